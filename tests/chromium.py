"""A headless Chromium, driven over the DevTools protocol through a pipe: no further package.

Used by tests/browser and docs/screenshots.py.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 120.0  # for a reply or a condition; long, because a loaded machine is slow


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser that runs until the end of a `with` block."""

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self._size, self._dark = (width, height), dark
        self._ids, self._buffer = itertools.count(1), b""
        self.problems: list[str] = []  # errors in the console, and exceptions

    def __enter__(self) -> "Browser":
        # Processes of the browser may write to it for a moment after its end.
        self._folder = tempfile.TemporaryDirectory(
            prefix="paceline-chromium-", ignore_cleanup_errors=True
        )
        command = [find_chromium() or NAMES[0], "--headless=new", "--remote-debugging-pipe"]
        command += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command += ["--no-first-run", "--disable-background-networking", "--mute-audio"]
        command += [f"--user-data-dir={self._folder.name}", "about:blank"]
        read, self._to = os.pipe()
        self._from, write = os.pipe()

        def connect() -> None:  # the browser reads from descriptor 3 and writes to 4
            low, high = os.dup(read), os.dup(write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        targets = self._send("Target.getTargets", session=None)["targetInfos"]
        target = next(found["targetId"] for found in targets if found["type"] == "page")
        attached = self._send("Target.attachToTarget", session=None, targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")
        self.resize(*self._size)
        if self._dark:
            dark = {"name": "prefers-color-scheme", "value": "dark"}
            self._send("Emulation.setEmulatedMedia", features=[dark])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def resize(self, width: int, height: int, ratio: float = 1.0) -> None:
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=False,
        )

    def open(self, url: str) -> None:
        """Open an address and wait until the page has drawn its data."""
        self.leave()
        self._send("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.ready === 'true'")

    def leave(self) -> None:
        """Close the page, so that it asks its server for nothing more."""
        self._send("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        reply = self._send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reply:
            raise AssertionError(f"{script}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true after {WAIT_S:g} s: {condition}; {self.problems}")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self._send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self._send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        reply = self._send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(reply["data"]))

    def _send(self, method: str, *, session: str | None = "page", **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                if "error" in reply:
                    raise AssertionError(f"{method}: {reply['error']}")
                return reply["result"]
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], WAIT_S)[0]:
                raise AssertionError(f"Chromium did not reply within {WAIT_S:g} s")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise AssertionError(f"Chromium ended with code {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", details).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(params["entry"]["text"]))
