"""The revisions of a git repository, each in a temporary worktree of its own.

The user's checkout is never touched: nothing is checked out in it, and no hook of it runs.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from fuzz.bisect.running import Unusable, environment, finish
from fuzz.terminal import UsageError

KEPT = 6
"""Worktrees that stay built: a flaky case runs on the same few again and again."""
MOST_SUBJECT = 100
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false")


class Revisions:
    """The revisions from `good` to `bad` along the first parents of `bad`, and worktrees of them
    while it is entered.

    Fields:
        names: full commit ids, the good end first.
        titles: the first lines of their messages.
    """

    def __init__(
        self, repo: Path, *, good: str, bad: str, build: str | None, timeout_s: int
    ) -> None:
        self._repo = repo
        self._build = build
        self._timeout_s = timeout_s
        self._trees: OrderedDict[int, Path] = OrderedDict()
        if not repo.is_dir() or _git(repo, "rev-parse", "--git-dir")[0]:
            raise UsageError(f"{repo} is no git repository: give --repo the path of a checkout.")
        first, last = self._commit(good, "good"), self._commit(bad, "bad")
        if first == last:
            raise UsageError(f"--good and --bad are one revision, {first[:12]}: give two.")
        if _git(repo, "merge-base", "--is-ancestor", first, last)[0]:
            raise UsageError(
                f"the good revision {good} is no ancestor of the bad one, {bad}: "
                "give a good one of the bad one's history."
            )
        # a revision that the good one is no ancestor of may have had the fault before it
        behind = set(_lines(repo, "rev-list", "--ancestry-path", f"{first}..{last}"))
        path = ("--first-parent", "--reverse", f"{first}..{last}")
        pairs = [
            (commit, _printable(title))
            for span in (("--no-walk", first), path)
            for commit, _, title in (
                line.partition(" ") for line in _lines(repo, "log", "--format=%H %s", *span)
            )
            if commit == first or commit in behind
        ]
        self.names = [commit for commit, _ in pairs]
        self.titles = [title for _, title in pairs]

    def _commit(self, revision: str, option: str) -> str:
        status, commit = _git(
            self._repo,
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            f"{revision}^{{commit}}",
        )
        if status:
            raise UsageError(
                f"{self._repo} has no revision {revision!r}: give --{option} a commit, tag or "
                "branch that `git log` knows."
            )
        return commit.strip()

    def __enter__(self) -> Revisions:
        self._folder = Path(tempfile.mkdtemp(prefix="kvoracle-bisect-"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for at in list(self._trees):
            self._remove(at)
        shutil.rmtree(self._folder, ignore_errors=True)

    def place(self, at: int) -> Path:
        """The folder of a revision, checked out and built.

        Raises:
            Unusable: it cannot be, and then nothing of it is left.
        """
        if at not in self._trees:
            while len(self._trees) >= KEPT:
                self._remove(next(iter(self._trees)))
            self._add(at)
        self._trees.move_to_end(at)
        return self._trees[at]

    def _add(self, at: int) -> None:
        # noted first, so that what an interrupted git leaves is removed as well, and under a
        # name that no other worktree of the repository has
        tree = self._trees[at] = self._folder / f"{self._folder.name}-{at}"
        status, said = _git(
            self._repo, "worktree", "add", "--quiet", "--detach", str(tree), self.names[at]
        )
        try:
            if status:
                raise Unusable(f"git cannot check it out: {said.strip()}")
            if self._build is not None:
                status, line = finish(
                    self._build, folder=tree, env=environment(), timeout_s=self._timeout_s
                )
                if status:
                    raise Unusable(f"its build exited with {status}: {line}")
        except Unusable:
            self._remove(at)
            raise

    def _remove(self, at: int) -> None:
        tree = self._trees.pop(at)
        # forced twice: one that git was interrupted in making is locked
        status, _ = _git(self._repo, "worktree", "remove", "--force", "--force", str(tree))
        if status:
            _, common = _git(self._repo, "rev-parse", "--git-common-dir")
            shutil.rmtree(self._repo / common.strip() / "worktrees" / tree.name, ignore_errors=True)
            shutil.rmtree(tree, ignore_errors=True)


def _lines(repo: Path, *arguments: str) -> list[str]:
    """The lines that git prints, whatever else ends a line elsewhere."""
    return [line for line in _git(repo, *arguments)[1].split("\n") if line]


def _printable(title: str) -> str:
    """A title that can do nothing to a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in title[:MOST_SUBJECT])


def _git(repo: Path, *arguments: str) -> tuple[int, str]:
    """Exit status, and what it printed (what it complained of, if it failed)."""
    try:
        done = subprocess.run(
            ["git", *QUIET, "-C", str(repo), *arguments],
            env=environment(LC_ALL="C"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            # Ctrl-C is for us to act on, once git has finished what it is at
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise UsageError("git is not installed: install it, or bisect over wheels.") from error
    return done.returncode, done.stderr if done.returncode else done.stdout
