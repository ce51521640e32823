"""Headless Chromium for tests of pages, over the pipe of its DevTools protocol.

with open_browser(profile) as browser:
    browser.open(page.as_uri(), width=390)
    assert browser.value("document.title") == "Transfer results"
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
A4_INCHES = (8.27, 11.69)


def find_browser() -> str:
    """Return the path of Chromium, or skip the test."""
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next(filter(None, programs), None) or pytest.skip("no Chromium is installed")


class Browser:
    """One tab, which is controlled by messages that end in a zero byte.

    Attributes:
        requests: Addresses that were requested since the last `open`.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; notes requests that happen meanwhile."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer

    def open(self, address: str, width: int, height: int = 844, **media: str) -> None:
        """Load a page in a window of this size, with media features such as `media="print"`."""
        features = [{"name": "prefers-color-scheme", "value": media.pop("scheme", "light")}]
        self.call("Emulation.setEmulatedMedia", media=media.get("media", ""), features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.requests.clear()
        self.load("Page.navigate", url=address)

    def load(self, method: str, **parameters: Any) -> None:
        """Send a command that loads a page, and wait until it is loaded."""
        self.call(method, **parameters)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            own = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **own
            )

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """Write a PNG file of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def print_a4(self, path: Path) -> Path:
        """Write a PDF file on A4, in the margins that the page asks for."""
        width, height = A4_INCHES
        size = {"paperWidth": width, "paperHeight": height, "preferCSSPageSize": True}
        found = self.call("Page.printToPDF", printBackground=True, **size)
        path.write_bytes(base64.b64decode(found["data"]))
        return path


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a profile folder of its own, or skip the test without one."""
    program = find_browser()
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    argv = ["bash", "-c", shell, program, *FLAGS.split(), f"--user-data-dir={profile}"]
    with open(os.devnull, "wb") as null:
        process = subprocess.Popen(
            argv, pass_fds=(read_commands, write_answers), stdout=null, stderr=null
        )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # it ends when its pipe does
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
