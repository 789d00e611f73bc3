"""The oracles of design section 4: each judges a run's steps and names what is wrong."""
