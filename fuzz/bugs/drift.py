"""Results that differ in their last bits, and kernels that race."""

from __future__ import annotations

from fuzz.bugs.registry import bug

bug(
    "triton#9887",
    "A kernel stores and loads an address with no barrier between, and reads what was there "
    "before.",
    missing="Wavefronts, or another unit of a kernel that a barrier would hold back.",
)
bug(
    "sglang#34607",
    "A bound on the divergence of two runs is so loose that small errors of a reused state pass.",
    by=("copied_state_one_ulp_off",),
)
bug(
    "sglang#34683",
    "How many rows a prefill has decides the order of its sums, and with it the answer behind a "
    "hit.",
    by=("rows_in_one_product",),
)
bug(
    "vllm#40896",
    "The first of several equal requests differs: its rows are summed in another order.",
    by=("rows_in_one_product",),
)
bug(
    "vllm#51187",
    "Five repeats of a workload give three different answers.",
    missing="The report shows a symptom and no cause.",
)
