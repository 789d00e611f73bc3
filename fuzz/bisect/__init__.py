"""Which version, or which component, brought a saved failure."""
