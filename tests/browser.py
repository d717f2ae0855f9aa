"""Chromium without a window, driven over WebDriver's protocol, for tests of pages."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium")
HERE = DRIVER is not None and BROWSER is not None

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_DRAWN = "return document.body.dataset.drawn !== undefined"
LOADED = "return document.readyState === 'complete'"
_KEYS = {"Down": "\ue015", "Up": "\ue013", "Left": "\ue012", "Right": "\ue014", "Home": "\ue011", "End": "\ue010"}
_KEYS.update({"Enter": "\ue007", "Tab": "\ue004"})
_MAX_WAIT = 60.0


class Browser:
    """One window.

    Args:
        url: of the driver's session.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, path: Path, width: int = 1280, height: int = 900, ready: str = _DRAWN) -> None:
        """Open a page and wait until it is drawn, or until another script returns true."""
        assert path.exists(), path
        self._send("window/rect", {"width": width, "height": height})
        self._send("url", {"url": path.resolve().as_uri()})
        self.wait(ready)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script of the page returns."""
        return self._send("execute/sync", {"script": script, "args": arguments})

    def wait(self, script: str) -> None:
        """Wait until a script returns something true."""
        until = time.monotonic() + _MAX_WAIT
        while not self.run(script):
            assert time.monotonic() < until, f"not within {_MAX_WAIT} s: {script}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that match."""
        actual = self.run("return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector)
        return [str(text) for text in actual]

    def type(self, selector: str, *keys: str) -> None:
        """Focus an element and press keys: names of keys, or texts."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        self.press(*keys)

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        presses = [
            {"type": kind, "value": key}
            for text in keys
            for key in ([_KEYS[text]] if text in _KEYS else text)
            for kind in ("keyDown", "keyUp")
        ]
        self._send("actions", {"actions": [{"type": "key", "id": "keys", "actions": presses}]})

    def hover(self, selector: str, x: float, y: float, click: bool = False) -> None:
        """Move the pointer over an element, to a place in fractions of its size, and click there if wanted."""
        box = self.run(
            "const element = document.querySelector(arguments[0]); element.scrollIntoView({block: 'center'});"
            "const box = element.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]",
            selector,
        )
        place = {"x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3])}
        moves: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, **place}]
        if click:
            moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._send("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def errors(self) -> list[str]:
        """What the console got that is worse than information, since the last call."""
        entries = self._send("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> None:
        """Save a screenshot as a PNG."""
        path.write_bytes(base64.b64decode(self._send("screenshot")))

    def _send(self, command: str, body: dict[str, Any] | None = None) -> Any:
        return _request(f"{self._url}/{command}", body)


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser with a profile in a directory of its own.

    Args:
        directory: an empty one.
    """
    assert DRIVER is not None and BROWSER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            assert driver.stdout is not None
            line = next(line for line in driver.stdout if "successfully on port" in line)
            url = f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}/session"
            options = {"binary": BROWSER, "args": [*_ARGUMENTS, f"--user-data-dir={directory}"]}
            expected = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _request(url, {"capabilities": {"alwaysMatch": expected}})["sessionId"]
            try:
                yield Browser(f"{url}/{session}")
            finally:
                _request(f"{url}/{session}", method="DELETE")
        finally:
            driver.terminate()


def _request(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # Proxies of the environment cannot reach this machine.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_MAX_WAIT) as answer:
        return json.load(answer)["value"]
