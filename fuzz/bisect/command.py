"""What `kvoracle bisect` does: names the version, or the component, that brought a failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

import systems
from fuzz import case
from fuzz.bisect.components import blame
from fuzz.bisect.components import shown as blame_shown
from fuzz.bisect.posterior import require_library
from fuzz.bisect.releases import Releases
from fuzz.bisect.revisions import Revisions
from fuzz.bisect.running import Runner, by_command, by_replay, by_system
from fuzz.bisect.search import Verdict
from fuzz.bisect.versions import Versions, first_bad, shown
from fuzz.bisect.wheels import Wheels
from fuzz.terminal import (
    EXIT_INTERRUPTED,
    JsonFile,
    Positive,
    UsageError,
    bars,
    check_kept,
    check_writable,
    deliver,
    err,
    out,
)

REPLAY_CHECKS, COMMAND_CHECKS = 1, 3
"""Runs of the bad end that show whether a case is flaky: a replay's tape decides everything."""

Confidence = Annotated[float, Parameter(validator=validators.Number(gte=0.5, lt=1))]


def bisect(
    file: Path,
    *,
    repo: Path | None = None,
    wheels: str | None = None,
    components: bool = False,
    good: str | None = None,
    bad: str | None = None,
    build: str | None = None,
    run: str | None = None,
    flaky: bool = False,
    confidence: Confidence = 0.99,
    checks: Positive | None = None,
    timeout_s: Positive = 600,
    cache: Path = Path("out/wheels"),
    json: JsonFile = None,
) -> int:
    """Find the first version on which a saved case fails, or the component at fault.  Exit status
    0 when it is one, 1 when several are left.

    Parameters
    ----------
    file
        A case that `kvoracle fuzz` saved.
    repo
        Search the revisions of this checkout, which is left as it is: each is checked out into a
        temporary worktree.
    wheels
        Search the released versions of this package.
    components
        Search the components of the optimized engine: which of them, with the reference in its
        place, lets the case pass.
    good
        A version on which the case passes: a commit, tag or branch, or a release.
    bad
        A later version on which it fails.
    build
        Shell command that builds a worktree; a revision on which it fails is skipped.
    run
        Shell command in the version's folder, which is on PYTHONPATH, with the case's path in
        KVORACLE_CASE: exit status 0 is good, 1 is bad, any other skips.  Without it, the case is
        replayed with the KVOracle of that version; one of another system, such as SGLang, with
        this KVOracle and that version of the system.
    flaky
        The case fails only sometimes: run versions until the posterior is clear.
    confidence
        Probability of one version at which a flaky search ends.
    checks
        Runs of the bad end that show whether the case is flaky: by default 1 of a replay, and 3
        of a command.
    timeout_s
        A build or run that takes longer skips its version.
    cache
        Folder of the package's wheels: those that are there are used, others downloaded.
    """
    check_writable(json)
    check_kept(file, json)
    if [repo is not None, wheels is not None, components].count(True) != 1:
        raise UsageError("say what to search: give one of --repo, --wheels and --components.")
    saved = case.load(file)
    if components:
        if (good, bad, build, run) != (None,) * 4 or flaky:
            raise UsageError(
                "components have no versions: leave out --good, --bad, --build, --run and --flaky."
            )
        return _over_components(saved, file, json=json)
    if good is None or bad is None:
        raise UsageError("a search over versions has two ends: give --good and --bad.")
    if build is not None and repo is None:
        raise UsageError("a wheel is built already: leave out --build, or give --repo.")
    if saved.mutant is not None and run is None:
        raise UsageError(
            f"{file} is a case of the mutant {saved.mutant!r}, which a replay plants in every "
            "version, so that none is the first bad one: give --components, or a case without one."
        )
    if flaky:
        require_library()
    opened: AbstractContextManager[Versions]
    if repo is not None:
        opened = Revisions(repo, good=good, bad=bad, build=build, timeout_s=timeout_s)
    elif wheels == systems.foreign(saved.system) and run is None:
        assert wheels is not None
        opened = nullcontext(Releases(wheels, good=good, bad=bad))
    else:
        assert wheels is not None, "one of the three was given"
        opened = nullcontext(Wheels(wheels, good=good, bad=bad, cache=cache))
    path = file.absolute()
    with opened as versions:
        result = first_bad(
            versions,
            _runner(saved, path, run, timeout_s=timeout_s),
            flaky=flaky,
            confidence=confidence,
            checks=checks or (COMMAND_CHECKS if run else REPLAY_CHECKS),
            tell=_teller(),
        )
        if isinstance(versions, Releases):
            result = versions.dated(result)
    deliver(out, shown(result), json=json, result=result)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return 0 if result.decided else 1


def _runner(saved: case.Case, file: Path, command: str | None, *, timeout_s: int) -> Runner:
    if command:
        return by_command(command, file, timeout_s=timeout_s)
    if systems.foreign(saved.system):
        return by_system(saved, timeout_s=timeout_s)
    return by_replay(saved, file, timeout_s=timeout_s)


def _over_components(saved: case.Case, file: Path, *, json: Path | None) -> int:
    with bars(err) as tick:
        blamed = blame(saved, file, tick=lambda done, total: tick("components", done, total))
    deliver(out, blame_shown(blamed), json=json, result=blamed)
    return 0 if blamed.decided else 1


def _teller() -> Callable[[str, Verdict, str], None]:
    """Prints each run on standard error as it ends."""
    number = 0

    def tell(name: str, verdict: Verdict, why: str) -> None:
        nonlocal number
        number += 1
        reason = f" ({why})" if why else ""
        err.print(f"run {number}: {name} {verdict}{reason}", markup=False, soft_wrap=True)

    return tell
