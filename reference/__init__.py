"""The specification, executable: pure PyTorch, float64, no cache, no kernel."""
