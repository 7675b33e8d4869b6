"""A headless Chromium, driven over chromedriver's WebDriver protocol with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Browser", "browser", "missing"]

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
_PATIENCE = 30.0


def missing() -> str | None:
    """What is not installed here, or None."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: apt-get install chromium chromium-driver)" if absent else None


class Browser:
    """One session of one window."""

    def __init__(self, address: str, capabilities: dict[str, Any]) -> None:
        self._address = address
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{made['sessionId']}"
        # The page that a new window shows by itself is not what is asked about.
        self._ask("POST", f"{self._session}/url", {"url": "about:blank"})
        self.requests()

    def open(self, page: Path) -> None:
        """Load a file."""
        self._ask("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What `script`, the body of a function, returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Click the element as a mouse does: it must be visible and not covered."""
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def press(self, selector: str, keys: str) -> None:
        """Give the element the focus and press keys."""
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": keys})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since this was last asked: "browser" (the console) or "performance" (DevTools' events)."""
        found: list[dict[str, Any]] = self._ask("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since this was last asked, data URIs left out."""
        events = [json.loads(each["message"])["message"] for each in self.log("performance")]
        sent = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """One command of the DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, file: Path) -> None:
        """What the window shows."""
        file.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        """End the session and its Chromium."""
        self._ask("DELETE", self._session)

    def _find(self, selector: str) -> str:
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}{path}", data=data, method=method)
        # Never by a proxy: it is a process of this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_PATIENCE) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:2000]}") from None


@contextlib.contextmanager
def browser(profile: Path, size: tuple[int, int] = (1280, 900)) -> Iterator[Browser]:
    """A Chromium of its own with the empty folder `profile`, ended at exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    options = [*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": options},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    try:
        _wait_for(driver, port)
        session = Browser(f"http://127.0.0.1:{port}", capabilities)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait(20)


def _wait_for(driver: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert driver.poll() is None, f"chromedriver ended with status {driver.returncode}"
        assert time.monotonic() < end, f"chromedriver does not listen after {_PATIENCE:g} s"
        time.sleep(0.05)
