"""A headless Chromium for tests, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import websocket

_START_S = 60.0
_ANSWER_S = 60.0


@dataclass
class Page:
    """One tab, and all it has asked the network for or complained of so far."""

    socket: websocket.WebSocket
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _serial: int = 0
    _events: list[str] = field(default_factory=list)

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command; returns its result."""
        self._serial += 1
        self.socket.send(json.dumps({"id": self._serial, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self._serial:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file at a width in CSS pixels; returns when it is loaded and `window.settled` (if there is one) is kept."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.do(f"{domain}.enable")
        self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.do("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._note(json.loads(self.socket.recv()))

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, once it is kept."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> bool:
        """Let the page draw until an expression is true; whether it came to be."""
        settled = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        until_s = time.monotonic() + _ANSWER_S
        while not self.evaluate(condition) and time.monotonic() < until_s:
            self.evaluate(settled)
        return bool(self.evaluate(condition))

    def hover(self, x: float, y: float) -> None:
        """Move the mouse there, in pixels of the window."""
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """The whole page, not only the window, as PNG."""
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A tab of a browser with a profile of its own in `folder`; all its processes end with the block."""
    command = [
        "chromium", "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run",
        "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
        "--disable-default-apps", "--disable-sync", "--remote-allow-origins=*", "--hide-scrollbars",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
    ]  # fmt: skip
    with open(folder.with_suffix(".log"), "w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            page = Page(_connect(process, folder, Path(log.name)))
            try:
                yield page
            finally:
                page.socket.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _connect(process: subprocess.Popen[bytes], folder: Path, log: Path) -> websocket.WebSocket:
    """To the first tab, once the browser has written down where it listens."""
    import websocket

    until_s = time.monotonic() + _START_S
    port_file = folder / "DevToolsActivePort"
    while not (port_file.exists() and len(port_file.read_text().split()) == 2):
        if process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"Chromium did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    port, path = port_file.read_text().split()
    browser = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=_ANSWER_S)
    try:
        browser.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
        while (message := json.loads(browser.recv())).get("id") != 1:
            pass
        tab = next(one for one in message["result"]["targetInfos"] if one["type"] == "page")
    finally:
        browser.close()
    return websocket.create_connection(f"ws://127.0.0.1:{port}/devtools/page/{tab['targetId']}", timeout=_ANSWER_S)
