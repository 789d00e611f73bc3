"""The experiments behind `kvoracle verify`."""
