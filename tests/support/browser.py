"""Debian's chromium without a window, driven over a pipe by the DevTools protocol."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.programs import program

# No account, network or update of its own, and no sandbox, which root cannot have.
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
LIMIT_SECONDS = 120.0


class Tab:
    """One page of a browser."""

    def __init__(self, to: int, back: int) -> None:
        """Open an empty page; ``to`` and ``back`` are the ends of the pipes."""
        self._to, self._back = to, back
        self._rest, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        sent = {"id": self._number, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._to, json.dumps(sent).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = os.read(self._back, 1 << 20)
            assert block, "the browser has ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def go(self, address: str) -> None:
        """Open an address."""
        self.call("Page.navigate", url=address)
        self.wait(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    def value(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        found = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + LIMIT_SECONDS
        while not self.value(condition):
            text = self.value("document.body ? document.body.innerText : ''")
            assert time.monotonic() < end, f"{condition} is not true of: {text}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" and kind == "keyDown" else ""
            code = {"Tab": 9, "Enter": 13}[key]
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text,
                windowsVirtualKeyCode=code,
            )

    def resize(self, width: int, height: int) -> None:
        """Show the page as on a screen of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 480, **size)

    def prefer(self, scheme: str) -> None:
        """Ask for a ``light`` or ``dark`` page."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a picture."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """Run a browser with an empty profile in a folder; its value is an empty page."""
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    shell = f'exec 3<&{to_read} 4>&{back_write}; exec "$0" "$@"'
    process = subprocess.Popen(
        [
            *("bash", "-c", shell, program("chromium"), *_FLAGS),
            f"--user-data-dir={folder / 'profile'}",
        ],
        pass_fds=(to_read, back_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(back_write)
    try:
        yield Tab(to_write, back_read)
    finally:
        process.terminate()
        process.wait(30)
        os.close(to_write)
        os.close(back_read)
