"""Headless Chromium behind a pipe: loads a page, looks at it, and says what went wrong in it.

Only what the tests of a report need of the DevTools protocol, without a driver between.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0
"""How long an answer may take."""


class BrowserError(AssertionError):
    """There is no browser, or it does not answer."""


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that has just been started, with an empty profile.

    Raises:
        BrowserError: where none is installed.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise BrowserError(
            "No browser is here to look at a report in: install chromium (Debian) or "
            "google-chrome, or leave these tests out with -m 'not browser'."
        )
    commands, answers = os.pipe(), os.pipe()
    # the child has them as 3 and 4, so that neither may be either of these here
    child = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands[0], answers[1])]

    def arranged() -> None:
        for number, end in enumerate(child, start=3):
            os.dup2(end, number)

    process = subprocess.Popen(
        [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=arranged,
        pass_fds=(3, 4),
    )
    for end in (commands[0], answers[1], *child):
        os.close(end)
    try:
        yield Browser(commands[1], answers[0])
    finally:
        process.kill()
        process.wait()
        os.close(commands[1])
        os.close(answers[0])


class Browser:
    """A tab of a running browser.

    Fields:
        requests: addresses that pages have asked for, allowed or not.
        complaints: what the console was told since the last page was opened.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file, and wait until it and all that it asks for are there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded, self.complaints = False, []
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._take(self._next())

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def picture(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._take(answer)

    def _take(self, event: dict[str, Any]) -> None:
        """Note what the page does by itself."""
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Audits.issueAdded"):
            self.complaints.append(json.dumps(params))

    def _next(self) -> dict[str, Any]:
        """The next message of the browser."""
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], until - time.monotonic())
            more = os.read(self._read, 1 << 20) if ready else b""
            if not more:
                raise BrowserError("The browser does not answer: start it by hand to see why.")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
