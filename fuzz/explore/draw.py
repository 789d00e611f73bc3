"""A run as a space-time diagram: a column for each process, a line for each event."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.explore.words import Envelope, Event, Flight, Kind
from fuzz.explore.world import World
from reference.protocol import Peer, Side, TransferKey

WIDTH = 9
"""Characters of a column."""


def drawn(world: World, run: tuple[Event, ...]) -> Iterator[str]:
    """The lines of a diagram, headings first."""
    peers = (*world.writers, *world.decoders)
    place = {peer: column for column, peer in enumerate(peers)}
    yield "".join(name(peer).center(WIDTH) for peer in peers)
    for event in run:
        ends = [place[peer._replace(incarnation=0)] for peer in _ends(world, event)]
        yield f"{_line(len(peers), ends)}  {sentence(world, event)}"


def _line(columns: int, ends: list[int]) -> str:
    """Bars for processes, a star where something happens, an arrow between two."""
    cells = ["|".center(WIDTH) for _ in range(columns)]
    for end in ends:
        cells[end] = "*".center(WIDTH)
    line = list("".join(cells))
    if len(ends) == 2:
        start, stop = (end * WIDTH + WIDTH // 2 for end in ends)
        step = 1 if stop > start else -1
        for at in range(start + step, stop, step):
            line[at] = "-"
        line[stop] = ">" if step > 0 else "<"
    return "".join(line)


def _ends(world: World, event: Event) -> tuple[Peer, ...]:
    """The processes that an event is about: where it starts, and where it ends."""
    what, decoders = event.what, world.decoders
    match event.kind:
        case Kind.DELIVER | Kind.DOUBLE | Kind.LOSE:
            return _from(what), what.to
        case Kind.ARRIVE:
            return what.writer, what.to
        case Kind.SETTLE:
            return (what.writer,)
        case Kind.BREAK:
            return (what[0].writer,)
        case Kind.KILL:
            return (what,)
        case Kind.TAKE | Kind.PREPARE | Kind.CANCEL_P:
            return (world.writers[event.rank],)
        case Kind.NOTICE if what.side is Side.DECODE:
            return (world.writers[event.rank],)
        case Kind.ADVERTISE | Kind.END_READING | Kind.RETRY | Kind.NOTICE | Kind.FENCE:
            return (decoders[event.rank],)
        case Kind.CANCEL_D | Kind.EXPIRE:
            return (decoders[event.rank],)
        case Kind.MEET:
            return decoders[event.rank], what
        case Kind.RESTART if what is Side.PREFILL:
            return world.writers if len(world.writers) != 2 else world.writers[:1]
        case Kind.ROUND_P | Kind.SUBMIT_P | Kind.RELAY_P:
            return world.writers if len(world.writers) != 2 else world.writers[:1]
        case _:
            return decoders if len(decoders) != 2 else decoders[:1]


def _from(envelope: Envelope) -> Peer:
    message = envelope.message
    return message.at if hasattr(message, "at") else message.writer


def sentence(world: World, event: Event) -> str:
    """What happens, in words."""
    what, rank = event.what, event.rank
    match event.kind:
        case Kind.SUBMIT_D:
            return "the next request comes to D"
        case Kind.SUBMIT_P:
            return "the next request comes to P"
        case Kind.ROUND_D:
            return "the ranks of D reduce, and reserve for whoever waits"
        case Kind.ROUND_P:
            return "the ranks of P reduce"
        case Kind.ADVERTISE:
            return f"D{rank} offers {name_key(what)}"
        case Kind.TAKE:
            return f"P{rank} takes its next piece"
        case Kind.PREPARE:
            return f"P{rank} has {_piece(world, what.piece)} of {name_key(what.key)} ready"
        case Kind.ARRIVE:
            return f"{_flight(world, what)} lands, part {what.parts + 1}"
        case Kind.SETTLE:
            return f"{_flight(world, what)} settles"
        case Kind.DELIVER:
            return f"{_message(what)} comes"
        case Kind.DOUBLE:
            return f"{_message(what)} comes, and will come again"
        case Kind.LOSE:
            return f"{_message(what)} is lost"
        case Kind.RETRY:
            return f"D{rank} says again what it said of {name_key(what)}"
        case Kind.END_READING:
            return f"D{rank} has read {name_key(what)}"
        case Kind.RELAY_D:
            return f"D is told to give {name_key(what)} up"
        case Kind.RELAY_P:
            return f"P is told to give request {what} up"
        case Kind.NOTICE:
            return f"{name(what)} is seen to be gone"
        case Kind.FENCE:
            return f"D{rank} has proof that the writes of {name(what)} are over"
        case Kind.GIVE_UP:
            return f"the router gives request {what} up"
        case Kind.MEET:
            return f"D{rank} and {name(what)} meet"
        case Kind.RESTART:
            return f"{'D' if what is Side.DECODE else 'P'} starts again"
        case Kind.CANCEL_D:
            return f"D{rank} gives {name_key(what)} up"
        case Kind.CANCEL_P:
            return f"P{rank} gives request {what} up"
        case Kind.EXPIRE:
            return f"D{rank} has waited too long for {name_key(what)}"
        case Kind.BREAK:
            return f"{_flight(world, what[0])} ends as {what[1].name}"
        case Kind.KILL:
            return f"{'D' if what.side is Side.DECODE else name(what)} dies"


def name(peer: Peer) -> str:
    """A process, with a dash for each life before."""
    return f"{'D' if peer.side is Side.DECODE else 'P'}{peer.rank}{_life(peer)}"


def _life(of: Peer | TransferKey) -> str:
    return "'" * of.incarnation


def name_key(key: TransferKey) -> str:
    """A transfer: its room and generation, with a dash for each life of D before."""
    return f"room {key.room}.{key.generation}{_life(key)}"


def _piece(world: World, piece: int) -> str:
    return "the aux row" if piece == world.bounds.topology.pieces else f"piece {piece}"


def _flight(world: World, flight: Flight) -> str:
    return f"{_piece(world, flight.piece)} of {name_key(flight.key)}"


def _message(envelope: Envelope) -> str:
    return f"{type(envelope.message).__name__} {name_key(envelope.message.key)}"
