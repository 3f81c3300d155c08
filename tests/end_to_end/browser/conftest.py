"""A real Chromium without a window, driven by its DevTools protocol over a pipe: nothing to install but the browser."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Whatever is waited for comes at last, or not at all.
DEADLINE_S = 90.0
_POLL_S = 0.03
_ARGUMENTS = (
    "--headless=new",
    # The tests' machine is often a container, as root.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One process of Chromium.

    Args:
        path: of its program.
        folder: for its profile.
    """

    def __init__(self, path: str, folder: Path) -> None:
        read_end, self._commands = os.pipe()
        self._answers, write_end = os.pipe()
        # It reads its descriptor 3 and writes to 4: these two must not be among ours.
        ours = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read_end, write_end)]
        os.close(read_end)
        os.close(write_end)
        self._process = subprocess.Popen(
            [path, *_ARGUMENTS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(ours[0], 3), os.dup2(ours[1], 4)),  # noqa: PLW1509 - no threads in between
        )
        for end in ours:
            os.close(end)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """One command's result; what else comes meanwhile is kept in `events`."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message = self._read(deadline - time.monotonic())
            if message.get("id") != self._number:
                self.events.append(message)
            elif "error" in message:
                raise AssertionError(f"{method}: {message['error']}")
            else:
                return message["result"]

    def _read(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, timeout_s))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise ConnectionError(f"the browser has ended with {self._process.poll()}")
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        """Ends the process."""
        os.close(self._commands)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, *, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """As a phone where it is that narrow."""
        mobile = width < 700
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Waits until an expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := self.run(expression)):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}; status: {self.text('#status')}")
            time.sleep(_POLL_S)
        return value

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, code: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def count(self, selector: str) -> int:
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def upload(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Errors on the console, uncaught exceptions, and whatever the content policy has refused."""
        self.run("1")
        found = []
        for event in self._events():
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
                found.append(str(parameters["entry"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning"}:
                found.append(str(parameters["args"]))
        return found

    def requested(self) -> list[str]:
        """Every address that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Browser]:
    path = os.environ.get("OUTRIDER_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium here: none of {', '.join(_NAMES)} is on the PATH, and OUTRIDER_CHROMIUM is not set")
    started = Browser(path, tmp_path_factory.mktemp("chromium"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def make(*, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        pages.append(Page(browser, width=width, height=height, dark=dark))
        return pages[-1]

    yield make
    for page in pages:
        page.close()
