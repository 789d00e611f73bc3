"""Kernels of the optimized engine, each beside its launcher.

Every launcher takes `backend`.  "torch" is the CPU engine's path: few operators, and on a CPU
bitwise batch-invariant, so that a row's result depends neither on how many rows share the call
nor on its place among them.  "triton" is the same computation as one would run it on a GPU; on a
CPU it runs under Triton's interpreter.  `mla` has a "tilelang" backend besides.
"""
