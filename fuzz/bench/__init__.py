"""Benchmarks against other people's tools."""
