"""A real Chromium, driven over its debugging pipe: no driver, no network, no further package."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.conftest import HANG

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_TAB, _ENTER = 9, 13
CODES = {
    "Tab": _TAB,
    "Enter": _ENTER,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    " ": 32,
}


def needs_chromium() -> None:
    if CHROMIUM is None:
        pytest.skip(
            "no browser: the page is not tried in a real one. Install it with: apt-get install chromium"
        )


class Browser:
    """One page at a time.

    ``requests`` are all addresses that the page asked for, ``complaints`` what the console said.
    """

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()

        def wire() -> None:  # Chromium reads commands from 3 and writes answers to 4
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--disable-background-networking",
                "--no-first-run",
                f"--user-data-dir={self.profile.name}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._number, self._session = 0, None
        self.unchanged: Path | None = None  # a page that tests have only read since it was opened
        self._unread = b""
        self.requests, self.complaints = [], []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        """The answer to a command; what happens in between is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._unread:
            part = self._in.read1()
            assert part, "Chromium ended"
            self._unread += part
        content, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(content)
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif kind == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif kind == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        self._last = kind
        return message

    def open(self, path: Path, width: int = 1600, height: int = 1000, scheme: str = "light") -> None:
        self.requests.clear()
        self.complaints.clear()
        self.unchanged = None
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.as_uri())
        while self._last != "Page.loadEventFired":
            self._read()

    def run(self, script: str):
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        code = {"windowsVirtualKeyCode": CODES[key], "key": key, "code": "Space" if key == " " else key}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element, wherever it is."""
        x, y = self.run(
            f"(() => {{const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
        finally:
            self._in.close()
            self._out.close()
            self.process.wait(HANG)
            self.profile.cleanup()
