"""The page in a real browser, at the width of a desk and of a phone: no error, every figure drawn, nothing too wide."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import CURVE, STAGES, load, report, tune

from draftsmith.eval.report.page import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}
PATIENCE = 60.0


class DevTools:
    """A page of a headless browser, spoken to over its debugging socket (a WebSocket, RFC 6455).

    Attributes:
        events: what the browser told of its own accord.
    """

    def __init__(self, url: str) -> None:
        host, path = re.fullmatch(r"ws://([^/]+)(/.*)", url).groups()
        name, port = host.split(":")
        self.socket = socket.create_connection((name, int(port)), timeout=PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET " + path + " HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        self.read = self.socket.makefile("rb")
        assert b" 101 " in self.read.readline()
        while self.read.readline() not in (b"\r\n", b""):
            pass
        self.count = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.count += 1
        self._send(json.dumps({"id": self.count, "method": method, "params": parameters}).encode())
        while True:
            message = json.loads(self._message())
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def value(self, script: str) -> Any:
        """Of a script that runs in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _send(self, data: bytes) -> None:
        size = len(data)
        head = bytes([0x81]) + (bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + struct.pack(">H", size))
        mask = os.urandom(4)
        self.socket.sendall(head + mask + bytes(c ^ mask[i % 4] for i, c in enumerate(data)))

    def _message(self) -> bytes:
        whole = b""
        while True:
            first, second = self.read.read(2)
            size = second & 0x7F
            if size > 125:
                size = int.from_bytes(self.read.read(2 if size == 126 else 8), "big")
            whole += self.read.read(size)
            if first & 0x80:
                return whole


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything there is."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, report(), CURVE, STAGES, load(), tune())
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The debugging port of a headless browser."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser on PATH to look at the page with: none of {', '.join(BROWSERS)}")
    profile = tmp_path_factory.mktemp("profile")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    flags += [f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions", "--disable-background-networking"]
    process = subprocess.Popen([program, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file, until = profile / "DevToolsActivePort", time.monotonic() + PATIENCE
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None, f"{program} ended with {process.returncode}"
            assert time.monotonic() < until, f"{program} opened no debugging port within {PATIENCE:.0f} s"
            time.sleep(0.1)
        yield int(port_file.read_text().splitlines()[0])
    finally:
        process.kill()
        process.wait()


def opened(port: int, page: Path, width: int, height: int, scheme: str = "light") -> DevTools:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)  # heeds no proxy, unlike urllib
    connection.request("GET", "/json/list")
    target = next(found for found in json.load(connection.getresponse()) if found["type"] == "page")
    connection.close()
    tools = DevTools(target["webSocketDebuggerUrl"])
    for domain in ("Runtime", "Log", "Network", "Page"):
        tools.call(f"{domain}.enable")
    tools.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
    )
    tools.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tools.call("Page.navigate", url=page.as_uri())
    until = time.monotonic() + PATIENCE
    while tools.value("location.protocol + document.readyState") != "file:complete":
        assert time.monotonic() < until, "the page was not loaded in time"
        time.sleep(0.05)
    return tools


@pytest.mark.parametrize("where", WIDTHS)
def test_every_figure_is_drawn_and_nothing_is_too_wide(browser: int, page: Path, where: str, tmp_path: Path) -> None:
    width, height = WIDTHS[where]
    tools = opened(browser, page, width, height)
    troubles = [event for event in tools.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
    troubles += [event for event in tools.events if event["method"] == "Runtime.consoleAPICalled"]
    assert troubles == [], "the console is not empty"
    asked = {e["params"]["request"]["url"] for e in tools.events if e["method"] == "Network.requestWillBeSent"}
    assert asked <= {page.as_uri()}, "nothing is fetched from elsewhere"
    boxes = tools.value(
        "[...document.querySelectorAll('svg')].map(s => { const b = s.getBoundingClientRect(), c = s.getBBox();"
        "return [s.getAttribute('aria-label'), b.width, b.height, b.right, c.width, c.height]; })"
    )
    assert len(boxes) == 22
    for name, wide, high, right, *drawn in boxes:
        assert min(wide, high, *drawn) > 20, name
        assert name.startswith("A tree") or right <= width, f"{name} reaches beyond the page"
    over = tools.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert over <= 0, "the page itself scrolls sideways"
    outside = tools.value(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('details') &&"
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"
    )
    assert outside == []
    tools.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    over = tools.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert over <= 0, "an opened table makes the page scroll sideways"


def test_the_page_is_dark_where_that_is_wanted(browser: int, page: Path) -> None:
    script = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
    looks = [opened(browser, page, *WIDTHS["desk"], scheme).value(script) for scheme in ("light", "dark")]
    light, dark = ([sum(map(int, re.findall(r"\d+", part))) for part in re.findall(r"\([^)]*\)", x)] for x in looks)
    assert light[0] > light[1]
    assert dark[0] < dark[1]
