"""A headless Chromium for tests of pages, driven through chromedriver (W3C WebDriver, HTTP on loopback).

with Browser(folder) as page:
    page.open("file:///tmp/report.html")
    page.run("return document.title")
    assert not page.errors()
assert not page.requests()
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Browser", "missing_browser"]


def missing_browser() -> str:
    """Why there is no browser for tests; empty where there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}" if missing else ""


class Browser:
    """One window. `dark`: prefers the dark theme; `width` and `height` of the page in CSS pixels."""

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 900, dark: bool = False, timeout: float = 60):
        self.timeout, self._net_log = timeout, folder / "net-log.json"
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._port = s.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={self._port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        arguments += [f"--window-size={width},{height}", f"--user-data-dir={folder / 'chromium'}"]
        arguments += [f"--log-net-log={self._net_log}", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
        options = {
            "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": int(1000 * timeout), "pageLoad": int(1000 * timeout)},
        }
        try:
            self._session = ""
            self._wait_for_driver()
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
            self._session = f"/session/{made['sessionId']}"
            self.size(width, height)
            self.dark(dark)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            if self._session:
                self._call("DELETE", self._session)
        except OSError:
            pass
        finally:
            self._driver.terminate()
            self._driver.wait(20)

    def open(self, address: str) -> None:
        """Load a page; what was logged before is forgotten."""
        self._logs("browser")
        self._call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page; a promise is awaited."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Run the body of a function until it returns something true."""
        deadline = time.monotonic() + (timeout or self.timeout)
        while not (value := self.run(script, *arguments)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {timeout or self.timeout} s: {script}\nlog: {self.errors()}")
            time.sleep(0.05)
        return value

    def keys(self, text: str) -> None:
        """Type into what has the focus; WebDriver's code points stand for keys: "\\ue004" is Tab, "\\ue007" Enter."""
        presses = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keys", "actions": presses}]
        self._call("POST", f"{self._session}/actions", {"actions": actions})

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """The page's size in CSS pixels."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", screen)

    def dark(self, on: bool) -> None:
        """Prefer the dark or the light theme."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """The page as a PNG file; `whole`: also what one would have to scroll to."""
        options = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            width, height = self.run("const e = document.documentElement; return [innerWidth, e.scrollHeight]")
            options["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        path.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", options)["data"]))
        return path

    def errors(self) -> list[str]:
        """Messages of the console since the page was opened, warnings included."""
        return [entry["message"] for entry in self._logs("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> set[str]:
        """Addresses that the closed browser requested over a network, in pages and in workers."""
        found = json.loads(self._net_log.read_text())["events"]
        asked = [e["params"] for e in found if "url" in e.get("params", {}) and "initiator" in e["params"]]
        return {p["url"] for p in asked if p["initiator"] != "not an origin"}  # such are the browser's own

    def processor_seconds(self) -> float:
        """Processor time of all processes of the browser."""
        total = 0.0
        for process in psutil.Process(self._driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                total += used.user + used.system
        return total

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _logs(self, kind: str) -> list[dict[str, Any]]:
        return self._call("POST", f"{self._session}/se/log", {"type": kind})

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                self._call("GET", "/status")
                return
            except ConnectionError:
                if time.monotonic() > deadline or self._driver.poll() is not None:
                    raise
                time.sleep(0.05)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self.timeout + 30)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json"})
            value = json.load(connection.getresponse())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{value['error']}: {value['message']}")
        return value
