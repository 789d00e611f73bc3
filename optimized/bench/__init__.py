"""Kernels against the clock, on a GPU; `kvoracle bench kernels` runs them."""
