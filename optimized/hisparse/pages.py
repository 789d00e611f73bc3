"""Logical pages that have their KV rows on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from optimized.memory.allocator import Allocator, Ids
from reference.contract import EngineOptions


class BackedPages(Allocator):
    """Logical pages, each with a host page for as long as anyone holds it: requests and prefixes
    that share the one share the other, and neither asks after it.

    Fields:
        hosts: hands out the host pages.
        backing: [logical pages] int64, host page of each; 0 where there is none.
    """

    def __init__(
        self, options: EngineOptions, hosts: Allocator, *, scrub: Callable[[Ids], None]
    ) -> None:
        super().__init__(
            options.pages,
            order=options.page_order,
            seed=options.seed,
            scrub=scrub,
            noun="logical pages",
            option="pages",
        )
        self.hosts = hosts
        self.backing = np.zeros(options.pages, dtype=np.int64)

    @property
    def available(self) -> int:
        return min(super().available, self.hosts.available)

    def require(self, count: int) -> None:
        self.hosts.require(count)
        super().require(count)

    def allocate(self, count: int) -> Ids:
        pages = super().allocate(count)
        self.backing[pages] = self.hosts.allocate(count)
        return pages

    def _return(self, freed: Ids) -> None:
        self.hosts.release(self.backing[freed])
        self.backing[freed] = 0
        super()._return(freed)
