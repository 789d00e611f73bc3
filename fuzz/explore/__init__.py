"""Interleavings of the drain protocol: a world in which they happen, and searches through them."""
