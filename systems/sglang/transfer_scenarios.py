"""What SGLang's transfer over NIXL does when something happens midway: one scenario a function.

They are those of `oracle_tests/test_process_drain.py`, which our own protocol passes, as far as
SGLang has the parts, and the windows that its own code leaves.  A write is caught midway by a
network that holds it back, so that each run is the same.

    python -m systems.sglang.transfer_scenarios ROOT [SCENARIO ...]

runs them on the release in ROOT, and prints what each broke, as JSON.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from reference.protocol import Abort, Ack, Phase, Posted, Settled, Side, SourceFreed
from systems.sglang import transfer_wire
from systems.sglang.loader import load
from systems.sglang.releases import Differences
from systems.sglang.transfer import Asked, Served, World, world

P, D = Side
ROOM, OTHER = 5, 6
PAGES, AFTER = [1, 2, 3], [4, 5, 6]
TURNS = 20
SOON_S = 0.05
"""The patience of a hold that is to end before its ACK comes; SGLang's own is 30 s."""


class Row(msgspec.Struct, frozen=True):
    """What a scenario showed on a release.

    Fields:
        clauses: those of `reference.drain` that the run broke, in order, with the judge's sentence
            about the first time.
        served: what D decodes the request from that was to be served in the end, if there is one.
        overwritten: the part of that request's pages in which another one's late write landed.
    """

    scenario: str
    release: str
    clauses: dict[str, str]
    served: Served | None = None
    overwritten: float = 0.0


Found = dict[str, Any]
Scenario = Callable[[Differences], Found]
SCENARIOS: dict[str, Scenario] = {}


def scenario(found: Scenario) -> Scenario:
    """Add to the scenarios, under the function's name."""
    SCENARIOS[found.__name__] = found
    return found


def caught(it: World, room: int = ROOM, pages: list[int] = PAGES) -> Asked:
    """A request whose writes were posted, and are under way."""
    for p in it.ends[P]:
        p("shut")
    asked = it.ask(room, pages)
    it.send(asked)
    it.until(lambda: it.count(Posted, asked) == it.ranks)
    return asked


def settle(it: World, asked: Asked) -> None:
    """Let the writes that were under way come to their end."""
    for p in it.ends[P]:
        p("open")
    it.until(lambda: it.count(Settled, asked) == it.ranks)


def give_up(it: World, asked: Asked) -> None:
    """D's client aborts the request, and P learns of it."""
    for d in it.ends[D]:
        d("abort", asked.name)
    it.tick(D)
    it.deliver(Abort)


def result(it: World, *, live: bool = True, but: Asked | None = None, **more: Any) -> Found:
    for asked in it.asked.values():
        it.finish(asked)
    clauses: dict[str, str] = {}
    for violation in it.violations(live=live, but=but):
        clauses.setdefault(str(violation.clause), violation.sentence)
    return {"clauses": clauses, **more}


@scenario
def nothing_happens(release: Differences) -> Found:
    with world(release) as it:
        return result(it, served=it.serve(it.ask(ROOM, PAGES)))


@scenario
def nothing_happens_on_two_ranks(release: Differences) -> Found:
    with world(release, ranks=2) as it:
        return result(it, served=it.serve(it.ask(ROOM, PAGES)))


@scenario
def a_writer_is_killed(release: Differences) -> Found:
    """D learns of it by its heartbeat, and gives the request up."""
    with world(release, patience_s=SOON_S) as it:
        asked = caught(it)
        it.kill(P)
        it.ends[D][0]("lose_prefill")
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        return result(it)


@scenario
def a_reader_is_killed(release: Differences) -> Found:
    """P's write breaks, and P gives the request up."""
    with world(release) as it:
        caught(it)
        it.kill(D)
        it.ends[P][0]("open")
        it.turns(P, lambda: it.has(SourceFreed))
        return result(it)


@scenario
def a_writer_is_stopped_and_goes_on(release: Differences) -> Found:
    with world(release) as it:
        asked = it.ask(ROOM, PAGES, deliver=False)
        it.ends[P][0].stop()
        for _ in range(TURNS):
            it.tick(D)
        it.ends[P][0].resume()
        it.deliver()
        return result(it, served=it.serve(asked))


@scenario
def a_reader_is_stopped_and_goes_on(release: Differences) -> Found:
    with world(release) as it:
        asked = it.ask(ROOM, PAGES)
        it.ends[D][0].stop()
        it.send(asked)
        it.until(lambda: it.has(Posted))
        for _ in range(TURNS):
            it.tick(P)
        assert not it.has(Settled), "the write is over, so that nothing was caught midway"
        it.ends[D][0].resume()
        return result(it, served=it.see_off(asked))


@scenario
def memory_that_is_given_up_waits_for_its_write(release: Differences) -> Found:
    with world(release) as it:
        asked = caught(it)
        give_up(it, asked)
        it.tick(D)
        settle(it, asked)
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        it.tick(P)
        return result(it, served=it.serve(it.ask(OTHER, PAGES)))


@scenario
def patience_ends_before_the_write(release: Differences) -> Found:
    """The next request gets the pages, and the late write lands in them."""
    with world(release, patience_s=SOON_S) as it:
        asked = caught(it)
        give_up(it, asked)
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        after = it.ask(OTHER, PAGES, source=AFTER)
        settle(it, asked)
        overwritten = it.landed(asked, after.pages)
        return result(it, live=False, overwritten=overwritten)


@scenario
def an_abort_is_lost(release: Differences) -> Found:
    """The network loses it; does D say it again?"""
    with world(release) as it:
        asked = caught(it)
        it.ends[D][0]("abort", asked.name)
        it.tick(D)
        it.deliver(Abort, drop=True)
        settle(it, asked)
        for _ in range(TURNS):
            it.tick(D)
            it.deliver(Abort)
        it.tick(P)
        return result(it)


@scenario
def an_ack_is_lost(release: Differences) -> Found:
    with world(release) as it:
        asked = caught(it)
        give_up(it, asked)
        settle(it, asked)
        it.until(lambda: it.waits(Ack))
        it.deliver(Ack, drop=True)
        for _ in range(TURNS):
            it.tick(D)
            it.deliver()
        it.tick(P)
        return result(it)


@scenario
def an_ack_comes_twice(release: Differences) -> Found:
    """The second one when the room is used again, and given up again."""
    with world(release) as it:
        asked = caught(it)
        give_up(it, asked)
        settle(it, asked)
        it.until(lambda: it.waits(Ack))
        letter = it.waits(Ack)[0]
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        it.tick(P)
        after = caught(it)
        it.ends[D][0]("abort", after.name)
        it.tick(D)
        it.arrive(letter)
        it.tick(D)
        it.deliver(Abort)
        settle(it, after)
        it.turns(D, lambda: it.is_everywhere(after, Phase.FREE))
        it.tick(P)
        return result(it)


@scenario
def a_post_is_refused(release: Differences) -> Found:
    """Of unknown outcome: part of it may be on its way."""
    with world(release) as it:
        it.ends[P][0]("refuse")
        asked = it.ask(ROOM, PAGES)
        it.send(asked)
        it.until(lambda: it.has(Settled) and (it.letters or it.ends[P][0]("status", ROOM) == 0))
        for _ in range(5):
            it.deliver()
            it.tick(D)
        it.tick(P)
        return result(it, live=False)


@scenario
def a_source_is_read_while_its_request_fails(release: Differences) -> Found:
    """P learns of the abort while its own write is under way, and polls."""
    with world(release) as it:
        asked = caught(it)
        give_up(it, asked)
        it.tick(P)
        settle(it, asked)
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        return result(it)


@scenario
def host_rows_are_given_up(release: Differences) -> Found:
    """As above, with HiSparse: the pages are host rows, which its coordinator frees."""
    with world(release, hisparse=True) as it:
        asked = caught(it)
        give_up(it, asked)
        it.tick(D)
        settle(it, asked)
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        it.tick(P)
        return result(it)


@scenario
def one_rank_drains_first(release: Differences) -> Found:
    with world(release, ranks=2) as it:
        asked = caught(it)
        give_up(it, asked)
        it.ends[P][0]("open")
        it.until(lambda: it.waits(Ack))
        it.deliver(Ack)
        it.tick(D)
        it.tick(D)
        settle(it, asked)
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        it.tick(P)
        return result(it)


@scenario
def a_row_names_another_room(release: Differences) -> Found:
    """On one of two ranks."""
    with world(release, ranks=2) as it:
        asked = it.ask(ROOM, PAGES)
        it.ends[P][1]("fill_row", asked.name, OTHER, 1)
        it.send(asked)
        it.until(lambda: it.count(Settled, asked) == 2)
        it.turns(D, lambda: it.phases[it.ends[D][1].me, asked.key] is Phase.FREE)
        it.tick(P)
        return result(it)


@scenario
def a_write_never_ends(release: Differences) -> Found:
    """Another room, to the same D, comes after it."""
    with world(release) as it:
        asked = caught(it)
        give_up(it, asked)
        it.ends[P][0]("keep")
        after = it.ask(OTHER, AFTER)
        return result(it, but=asked, served=it.serve(after))


def reused(release: Differences, room: int) -> Found:
    """A room is given up while its write is under way, and another request comes for `room`."""
    with world(release) as it:
        asked = caught(it)
        give_up(it, asked)
        it.tick(P)
        after = it.ask(room, AFTER)
        settle(it, asked)
        for _ in range(3):
            it.tick(P)
        served = it.serve(after)
        return result(it, served=served)


@scenario
def a_room_is_used_again(release: Differences) -> Found:
    return reused(release, ROOM)


@scenario
def another_room_is_used(release: Differences) -> Found:
    """The control of the one before."""
    return reused(release, OTHER)


@scenario
def a_room_and_its_row_are_used_again(release: Differences) -> Found:
    """And the patience of the first hold has ended, so the second request has its memory."""
    with world(release, patience_s=SOON_S, rows=1) as it:
        asked = caught(it)
        give_up(it, asked)
        it.turns(D, lambda: it.is_everywhere(asked, Phase.FREE))
        it.tick(P)
        after = it.ask(ROOM, PAGES, source=AFTER)
        settle(it, asked)
        served = it.serve(after)
        return result(it, served=served, overwritten=it.landed(asked, after.pages))


def main(root: str, *names: str) -> None:
    """Run scenarios on the release in `root`, and print their rows."""
    torch.set_num_threads(1)  # a pool of threads does not survive the forks
    transfer_wire.install()
    release = load(Path(root))
    for name in ("nixl.conn", "decode", "prefill"):
        importlib.import_module(f"sglang.srt.disaggregation.{name}")
    rows = [
        Row(scenario=name, release=release.version, **SCENARIOS[name](release.differences))
        for name in names or SCENARIOS
    ]
    print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


if __name__ == "__main__":
    os.environ.update(UCX_TLS="tcp", NIXL_LOG_LEVEL="ERROR")
    main(*sys.argv[1:])
