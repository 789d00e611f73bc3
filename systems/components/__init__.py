"""Components of the optimized engine that the reference can stand in for, each by itself.

A component is a module of `optimized`; its stand-ins replace the functions that others call.  They
take the same arguments and touch the same memory, and what they compute is the reference's, slow
and obvious: no backend, no batch, one row at a time.  What a stand-in asks another component for,
it asks the engine's own, so that a fault stays with its component.  (`kvoracle bisect
--components` puts them in one by one.)

Not among them, since the reference judges these and does not do them: the drain protocol, the
host tier, backups, and which calls the engine makes in which order.
"""

from __future__ import annotations

from systems.components.addresses import ADDRESSING, PLANNER
from systems.components.attention import DSA, KDA, MLA, SELECT
from systems.components.component import Component as Component
from systems.components.hot import COORDINATOR, PAGES, SWAP_IN
from systems.components.memory import ALLOCATOR, POOLS, PREFIX_TREE
from systems.components.rows import DECODE_UPDATE, GATHER, KV_STORE, POOL_STORE, POOLED_KEY, STORE
from systems.components.transfer import PLAN, TRANSFERS

COMPONENTS = (
    ADDRESSING,
    PLANNER,
    KV_STORE,
    GATHER,
    POOLED_KEY,
    POOL_STORE,
    DECODE_UPDATE,
    STORE,
    SELECT,
    DSA,
    MLA,
    KDA,
    ALLOCATOR,
    POOLS,
    PREFIX_TREE,
    SWAP_IN,
    COORDINATOR,
    PAGES,
    PLAN,
    TRANSFERS,
)
"""All of them, in the order in which they are tried."""
