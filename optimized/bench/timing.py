"""Device time of launches that are too short for a clock of the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LEAST = 64
"""Launches in a graph, of short ones: what starting it costs is spread over so many."""
REPLAYS = 25
TAKES = 2

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Fields:
    us: median microseconds a launch, of the better take.
    spread: by what part the medians of the takes differ.
    """

    us: float
    spread: float


def timed(launches: Sequence[Launch], *, least: int = LEAST) -> Timing:
    """The time of one of `launches`, which do the same to different memory: all are captured in one
    CUDA graph, again and again until there are `least`, and the graph is replayed.  Together their
    inputs should be larger than the L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = -(-least // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in [*launches] * rounds:
            launch()
    graph.replay()
    takes = sorted(_median_ms(graph) * 1e3 / (rounds * len(launches)) for _ in range(TAKES))
    return Timing(us=takes[0], spread=takes[-1] / takes[0] - 1)


def _median_ms(graph: torch.cuda.CUDAGraph) -> float:
    spans = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        spans.append(start.elapsed_time(stop))
    return statistics.median(spans)
