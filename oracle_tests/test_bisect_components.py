"""Components: the reference in the place of each is clean, and the one at fault is named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

import systems
from fuzz import mutants, targets
from fuzz.bisect.command import bisect
from fuzz.bisect.components import Blamed, blame, shown
from fuzz.case import Case, case_of, save
from fuzz.mutants.registry import planted
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Pin
from fuzz.terminal import Terminal, UsageError
from systems.components import COMPONENTS

CAMPAIGNS = (
    ("prefix_split", "stamped", 200),
    ("slot_reuse", "stamped", 30),
    ("hot_buffer", "stamped", 20),
    ("host_restore", "stamped", 4),
    ("prefix_split", "model", 3),
    ("transfer", None, 6),
)
"""Target, payload and executions."""

UNREACHED = {
    "optimized.addressing.closed_groups",
    "optimized.addressing.visible_groups",
    "optimized.kernels.kv_store.decode_rows",
    "optimized.kernels.kv_store.encode_e4m3",
    "optimized.kernels.kv_store.fp8_scale",
    "optimized.kernels.pooled_key.page_views",
}
"""What only the engine's own functions of other components ask for."""

FAULTS = {
    "slot_of_group_as_position": "addressing",
    "extend_by_loc": "planner",
    "packed_scales_before_codes": "kernels.kv_store",
    "keys_read_flat": "kernels.gather",
    "rotated_before_pooling": "kernels.pooled_key",
    "newest_key_from_stale_ring": "kernels.decode_update",
    "ring_written_before_it_is_read": "store",
    "tail_starts_one_late": "kernels.select",
    "one_group_too_many_visible": "dsa",
    "void_cells_gather_slot_0": "kernels.mla",
    "decay_read_past_its_channels": "kda",
    "freed_rows_not_poisoned": "memory.pools",
    "locked_page_evicted": "memory.prefix_tree",
    "hit_evicted_by_miss": "kernels.swap_in",
    "tags_left_at_release": "hisparse.coordinator",
    "host_page_never_freed": "hisparse.pages",
    "state_left_out": "transfer.plan",
}
"""By mutant the component whose function it replaces."""


def counted(calls: Counter[str], names: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Stand-ins that count how often they are called."""

    def count(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(_: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return body(*args, **kwargs)

        return stand_in

    return {name: count(name, body) for name, body in names.items()}


def test_with_every_stand_in_the_engine_is_clean():
    system, calls = systems.load("optimized"), Counter[str]()
    with ExitStack() as stack:
        for component in COMPONENTS:
            stack.enter_context(planted(counted(calls, component.stand_ins)))
        for target, payload, executions in CAMPAIGNS:
            for seed in range(executions):
                outcome = execute(
                    system, targets.find(target), Tape(seed=seed), pin=Pin(payload=payload)
                )
                assert not outcome.violations, (target, seed)
    names = {name for component in COMPONENTS for name in component.stand_ins}
    assert names - calls.keys() == UNREACHED


def test_each_component_alone_is_clean_of_what_others_hide():
    """What the test above cannot reach."""
    system, calls = systems.load("optimized"), Counter[str]()
    for component in COMPONENTS:
        if UNREACHED.isdisjoint(component.stand_ins):
            continue
        with planted(counted(calls, component.stand_ins)):
            for payload, executions in (("stamped", 10), ("model", 1)):
                for seed in range(executions):
                    pin = Pin(payload=payload)
                    target = targets.find("prefix_split")
                    assert not execute(system, target, Tape(seed=seed), pin=pin).failed
    assert calls.keys() >= UNREACHED


def failing(name: str) -> Case:
    """The first short case of a mutant."""
    mutant, system = mutants.find(name), systems.load("optimized")
    pin = msgspec.structs.replace(mutant.pin, operations=10)
    with mutant.applied():
        runs = (
            execute(system, targets.find(mutant.target), Tape(seed=seed), pin=pin)
            for seed in range(300)
        )
        outcome = next(run for run in runs if run.failed)
    return case_of(outcome, system="optimized", path=Path("x"), pin=pin, mutant=name)


def blamed(case: Case) -> Blamed:
    return blame(case, Path("case.json"), tick=lambda done, total: None)


def text(result: Blamed) -> str:
    terminal = Terminal()
    with terminal.capture() as captured:
        terminal.show(shown(result))
    return captured.get()


@pytest.mark.parametrize(("name", "component"), FAULTS.items())
def test_the_component_of_a_mutant_is_named(name, component):
    result = blamed(failing(name))
    assert result.found == [component]
    assert result.decided
    assert f"at fault: optimized.{component}" in text(result)
    others = [swap.result for swap in result.swaps if swap.component != component]
    assert "passes" not in others


def test_two_faults_are_named_together():
    """The case of one mutant, while another one that it does not know of is planted as well."""
    with mutants.find("extend_by_loc").applied():
        result = blamed(failing("scales_at_page_start"))
    assert result.together
    assert set(result.found) == {"planner", "kernels.pooled_key"}
    assert "at fault together: " in text(result)


def test_a_fault_of_what_has_no_stand_in_is_of_none():
    result = blamed(failing("page_short_at_boundary"))
    assert result.found == []
    assert not result.decided
    assert "None of these is at fault" in text(result)


def test_the_command_writes_its_result(tmp_path, capsys):
    case, result = tmp_path / "case.json", tmp_path / "result.json"
    save(failing("gather_by_loc"), case)
    assert bisect(case, components=True, json=result) == 0
    assert "at fault: optimized.addressing" in capsys.readouterr().out
    assert json.loads(result.read_text())["found"] == ["addressing"]


def test_what_cannot_be_blamed_gets_a_sentence(tmp_path):
    case = failing("gather_by_loc")
    with pytest.raises(UsageError, match="is a case of the system 'reference'"):
        blamed(msgspec.structs.replace(case, system="reference"))
    with pytest.raises(UsageError, match="does not fail as it was saved"):
        blamed(msgspec.structs.replace(case, mutant=None))
    save(case, tmp_path / "case.json")
    with pytest.raises(UsageError, match="components have no versions"):
        bisect(tmp_path / "case.json", components=True, good="a")
