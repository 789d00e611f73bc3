"""What stored rows are, and who wrote them: told by their bytes alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fuzz.oracles.view import Layer
from fuzz.report.moment import Moment
from fuzz.report.parts import Holder
from fuzz.stamps import Bytes, Stamper, mix, unit_of
from fuzz.step import Client
from reference.contract import Component, RequestId

POISON = 0xFF


class Content(NamedTuple):
    """What a stored row is: "written", "poison", "zeros" or "other", in words, and by which
    request."""

    kind: str
    words: str
    request: int | None = None


NOBODYS = Content("other", "a row that no request wrote")
COMPUTED = Content("written", "what the model computed")
PART = Content("written", "a rank's own heads of a state")
UNSEEN = Content("unseen", "not looked at: nobody reads it")
BEYOND = Content("other", "nothing: it lies behind the end of the buffer")


class _Row(NamedTuple):
    """Bytes that a request may have written, and whether it has stored the last of their tokens
    itself."""

    stored: bytes
    content: Content
    by_itself: bool


class Contents:
    """Says what rows are, by their bytes.  Of requests whose tokens are the same so far the first
    that has stored them counts as the writer, but for those that hold the row."""

    def __init__(
        self,
        stamper: Stamper | None,
        clients: Iterable[Client],
        stored: Mapping[RequestId, set[int]] = MappingProxyType({}),
    ) -> None:
        """Without a `stamper`, of a model run, nobody is known to have written a row.  `stored`:
        the positions of each request that it stored itself, as far as that is known."""
        self._stamper, self._clients, self._stored = stamper, list(clients), stored
        self._known: dict[Layer, dict[bytes, list[Content]]] = {}

    def of(self, moment: Moment, at: Layer, row: int, holders: Sequence[Holder] = ()) -> Content:
        """What is in a row of a layer; if one of its holders can have written it, it has."""
        if at not in moment.rows:
            return UNSEEN
        if row >= len(moment.rows[at]):
            return BEYOND
        if not moment.seen[at][row]:
            return UNSEEN
        return self.named(at, moment.rows[at][row], holders)

    def named(self, at: Layer, stored: Bytes, holders: Sequence[Holder] = ()) -> Content:
        """What these bytes [row bytes] are, in a row of a layer."""
        if (stored == POISON).all():
            return Content("poison", "poison")
        if not stored.any():
            return Content("zeros", "zeros")
        if self._stamper is None:
            return COMPUTED
        if at[0] is Component.STATE and len(stored) != 4 * self._stamper.shape.state_width:
            return PART
        if at not in self._known:
            rows = sorted(self._written(self._stamper, *at), key=lambda row: not row.by_itself)
            known: dict[bytes, list[Content]] = defaultdict(list)
            for row in rows:
                known[row.stored].append(row.content)
            self._known[at] = known
        writers = self._known[at].get(stored.tobytes(), [NOBODYS])
        held = {holder.request for holder in holders}
        return next((writer for writer in writers if writer.request in held), writers[0])

    def _written(self, stamper: Stamper, component: Component, layer: int) -> Iterator[_Row]:
        """All rows that anybody can have written in a layer."""
        kpool = stamper.geometry.kpool
        stamped = Component.KV if component is Component.HOT else component
        for client in self._clients:
            length = len(client.chain)
            if component is Component.INDEX:
                length = length // kpool * kpool
            if length:
                rows = stamper.expected(stamped, mix(client.chain[:length]), layer)
                step = length // len(rows)
                own = self._stored.get(client.request, ())
                for i, row in enumerate(rows):
                    unit = unit_of(stamped, i + (component is Component.STATE), kpool)
                    words = f"{client.name}'s {unit}"
                    content = Content("written", words, int(client.request))
                    yield _Row(row.tobytes(), content, (i + 1) * step - 1 in own)
