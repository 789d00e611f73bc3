"""The released versions of a foreign system, with each of which a case can be replayed."""

from __future__ import annotations

from pathlib import Path

import msgspec

import systems
from fuzz.bisect.running import Unusable
from fuzz.bisect.versions import Bisected
from fuzz.terminal import UsageError


class Releases:
    """The releases of `package` from `good` to `bad`.  Where the bad one is the older one, the
    search goes back in time: the first bad one is the last that the next release mended.

    Fields:
        names: versions, the good end first.
        titles: nothing more is known of them.
    """

    def __init__(self, package: str, *, good: str, bad: str) -> None:
        self._package = package
        known = systems.releases(package)
        for version, option in ((good, "good"), (bad, "bad")):
            if version not in known:
                raise UsageError(
                    f"nothing is known here of {package} {version!r}: give --{option} one of "
                    f"{', '.join(known)}."
                )
        if good == bad:
            raise UsageError(f"both ends are {good}: give --good a version on which it passes.")
        first, last = known.index(good), known.index(bad)
        self._back = first > last
        self.names = known[last : first + 1][::-1] if self._back else known[first : last + 1]
        self.titles = [""] * len(self.names)

    def dated(self, result: Bisected) -> Bisected:
        """What was found, with the version that mended it if the search went back in time."""
        if not self._back or not result.decided:
            return result
        before = self.names.index(result.suspects[0].names[0]) - 1
        return msgspec.structs.replace(result, mended=self.names[before])

    def place(self, at: int) -> Path:
        """The folder of a version, which holds the package.

        Raises:
            Unusable: it can neither be found nor fetched.
        """
        try:
            return systems.unpacked(self._package, self.names[at])
        except systems.CannotLoad as error:
            raise Unusable(str(error)) from error
