"""Debian's headless Chromium, driven by its chromedriver over WebDriver's HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-crash-reporter", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
)  # fmt: skip


class Browser:
    """One window.

    Args:
        port: of chromedriver.
        folder: for what the browser keeps.
    """

    def __init__(self, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        made = self._ask("", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self._url += f"/{made['sessionId']}"

    def _ask(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def open(self, address: str) -> None:
        self._ask("/url", {"url": address})

    def run(self, script: str) -> Any:
        """What the script returns."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def tell(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._ask("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Be a window of that size, for people who prefer light or dark."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Of the whole page, below the window, too."""
        taken = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self._ask("", None, "DELETE")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser; skips the test where there is none."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("chromium is not here: it is in Debian's packages chromium and chromium-driver")
    log = folder / "chromedriver.log"
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    with log.open("wb") as output:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        opened = Browser(_port_of(log), folder / "profile")
        try:
            yield opened
        finally:
            opened.close()
    finally:
        driver.terminate()
        driver.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)  # what the browser has left


def _port_of(log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if "started successfully on port" in line:
                return int(line.rstrip(".").rpartition(" ")[2])
        time.sleep(0.05)
    raise AssertionError(f"chromedriver did not start: {log.read_text()}")
