"""The timeline page in headless Chromium: hover, zoom, keyboard, panels, 64 ranks; no console error, no request off the page."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.program import Costs, build, simulate
from fourfold.view.page import PageSpan, Panel, Row, panel_of, write_page

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None, reason="needs chromium and chromedriver"
)


class Browser:
    """A browser, spoken to by WebDriver's protocol."""

    def __init__(self, address: str, folder: Path):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder}", "--window-size=1200,900"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.address = address
        made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{made['sessionId']}"

    def _post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(self.address + path, json.dumps(data).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self._post("/url", {"url": page.resolve().as_uri()})
        self.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        return self._post("/execute/sync", {"script": script, "args": []})

    def painted(self, script: str) -> Any:
        """Run a script, wait for the next frame, return the visible range of time and the tooltip."""
        return self.run(
            script + "; return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => "
            "done({from, to, tip: $('tip').textContent, detail: $('detail').textContent, shown, found: $('found').textContent}))))"
        )

    def key(self, key: str) -> Any:
        return self.painted(f"dispatchEvent(new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}}))")

    def logs(self, kind: str) -> list[dict[str, Any]]:
        return self._post("/se/log", {"type": kind})

    def close(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self.address, method="DELETE"), timeout=60).close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        port = next(line.split("port ")[-1].strip(". \n") for line in driver.stdout if "successfully on port" in line)
        found = None
        try:
            found = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("chromium"))
            yield found
        finally:
            if found is not None:
                found.close()
            driver.terminate()


def clean(browser: Browser, page: Path) -> None:
    """Nothing in the console, and no request but for the page."""
    assert browser.logs("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.logs("performance")]
    urls = {m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"}
    asked_for = {url for url in urls if not url.startswith(("chrome://", "data:"))}  # the first, empty tab has these
    assert asked_for <= {page.resolve().as_uri()}


def test_the_page(browser: Browser, tmp_path: Path) -> None:
    bad = "</script><script>window.broken = 1</script>"
    planned = panel_of("planned", simulate(build("1f1b", 4, 8), Costs(message=0.1)))
    gather = PageSpan(0.0, 6.0, "G", f"the parameters of {bad}", 3 << 20)
    rows = []
    for r in range(4):
        ops = [(i, "FB"[i % 2]) for i in range(20)]
        spans = [PageSpan(i + r / 4, i + r / 4 + 0.8, kind, f"{r}{kind}{i} blocks.{i}.mlp") for i, kind in ops]
        rows.append(Row(f"rank {r}", (*spans, gather), {"bubble": 1.0}))
    memory = tuple(((0.0, 1e9), (5.0, 3e9), (15.0, 2e9)) for _ in range(4))
    peaks = tuple((5.0, 3e9, {"parameters": 1e9, bad: 2e9}) for _ in range(4))
    measured = Panel("measured", tuple(rows), ((0, 0.0, 5.0),), memory, "memory", "bytes", 4e9, peaks)
    page = tmp_path / "p.html"
    write_page(page, bad, "a sentence", [planned, measured], unit="", more=bad)
    browser.open(page)
    assert browser.run("return document.title") == bad
    assert browser.run("return window.broken") is None
    start = browser.painted("")
    assert (start["from"], start["to"], start["shown"]) == (0, 10_000_000, [True, True])

    move = "const b = canvas.getBoundingClientRect(), put = (x, y) => canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + x, clientY: b.top + y, bubbles: true}))"
    hover = browser.painted(f"{move}; const l = layout()[1]; put(X(data.ticks / data.length * 4.3), l.y + 4)")
    assert "0F4 blocks.4.mlp" in hover["tip"]
    assert "stage 0, micro-batch 4, unit blocks.4.mlp" in hover["tip"]
    assert "from 4 to 4.8" in hover["tip"]
    under = browser.painted(f"{move}; const l = layout()[1]; put(X(data.ticks / data.length * 3), l.y + l.h + 3)")
    assert "3.00 MiB" in under["tip"]
    assert bad in under["tip"]
    held = browser.painted(f"{move}; const l = layout()[1]; put(X(data.ticks / data.length * 6), l.bottom + 30)")
    assert browser.run("return data.panels.map(p => p.least)") == [0, 0]  # with a limit from 0
    assert "at its peak" in held["tip"]
    assert "limit: 3.73 GiB" in held["tip"]

    assert browser.run("return worst()") == pytest.approx(
        max(row.lost["bubble"] / planned.length for row in planned.rows), abs=1e-3
    )  # the longest bar in the margin
    assert "waiting for another rank" in browser.run("return $('legend').textContent")

    wheel = browser.painted("canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: -100, clientX: 700, clientY: 300}))")
    assert 0 < wheel["from"] < wheel["to"] < 10_000_000
    assert browser.key("d")["from"] > wheel["from"]
    assert browser.key("0")["to"] == 10_000_000
    browser.painted(f"{move}; const l = layout()[1]; put(X(data.ticks / data.length * 6), l.bottom + 30)")
    assert browser.run("return $('tip').style.display") == "block"
    assert browser.key("w")["from"] > 0
    assert browser.run("return $('tip').style.display") == "none"  # it told of what was there before
    assert browser.key("0")["from"] == 0
    assert [browser.key("p")["shown"] for _ in range(3)] == [[True, False], [False, True], [True, True]]
    browser.painted("shown = [false, true]; data.panels[1].end = 4e6")
    assert browser.key("0")["to"] == 4e6  # the panels that are shown
    browser.painted("shown = [true, true]; fit()")
    labels = "return [0, 0.05, 1, 2.5].map(t => tickText(t / data.length * MAX))"
    assert browser.run(labels) == ["0", "0.05", "1", "2.5"]
    assert browser.run("data.unit = 's'; " + labels) == ["0", "50 ms", "1 s", "2.5 s"]  # no digits that say nothing
    assert "computes" in browser.key("ArrowDown")["detail"]
    assert "from" in browser.key(".")["detail"]
    assert browser.painted("$('find').value = 'blocks.7.'; search()")["found"] == "4 found"
    assert "blocks.7.mlp" in browser.key(".")["detail"]
    assert browser.painted("$('path').click(); return path") is True
    assert "rank 3" in browser.run("$('numbers').click(); return $('tables').innerText")
    themes = [browser.run("$('theme').click(); return document.documentElement.dataset.theme") for _ in range(2)]
    assert sorted(themes) == ["dark", "light"]
    clean(browser, page)


def test_memory_of_a_process_is_drawn_where_it_changes(browser: Browser, tmp_path: Path) -> None:
    row = Row("rank 0", (PageSpan(0.0, 10.0, "F", "0F0"),))
    page = tmp_path / "p.html"
    memory = (((0.0, 3e8), (5.0, 3.1e8)),)
    write_page(page, "p", "", [Panel("measured", (row,), memory=memory, memory_name="memory", memory_unit="bytes")])
    browser.open(page)
    assert browser.run("return [data.panels[0].least, data.panels[0].most]") == [3e8, 3.1e8]
    clean(browser, page)


def test_64_ranks(browser: Browser, tmp_path: Path) -> None:
    """128,000 spans are drawn at once; how fast is measured (docs/view.md), not asserted."""
    rows = tuple(
        Row(f"rank {r}", tuple(PageSpan(i, i + 0.9, "FBWR"[i % 4], f"{r}F{i}") for i in range(2000))) for r in range(64)
    )
    page = tmp_path / "p.html"
    write_page(page, "64 ranks", "a sentence", [Panel("measured", rows)])
    begin = time.monotonic()
    browser.open(page)
    print(f"opened in {time.monotonic() - begin:.2f} s")
    frames = browser.run(
        "frames = []; let n = 0; zoom(0.5, MAX / 2);"
        "const begun = performance.now(); return new Promise(done => { const pan = () => { move(n % 2 ? 0.05 : -0.05);"
        "n++ < 60 ? requestAnimationFrame(pan) : done([...frames, (performance.now() - begun) / 60]); }; pan(); })"
    )
    between = frames.pop()
    print(f"a frame is drawn in {sorted(frames)[len(frames) // 2]:.1f} ms; panned at {1000 / between:.0f} frames/s")
    assert len(frames) > 50
    assert browser.run(
        "return canvas.height <= innerHeight * devicePixelRatio"
    )  # the canvas is not as tall as the rows
    drawn = "const p = g.getImageData(0, 0, canvas.width, canvas.height).data, s = new Set(); for (let i = 0; i < p.length; i += 4) s.add(p[i] << 16 | p[i + 1] << 8 | p[i + 2]); return [0x56B4E9, 0xE69F00, 0x009E73, 0xF0E442].every(c => s.has(c))"
    assert browser.run("scrollTo(0, 0); zoom(0.01, MAX / 2); return new Promise(d => setTimeout(d, 300))") is None
    assert browser.run(drawn)
    for _ in range(64):
        browser.key("ArrowDown")  # to a row far below: it comes into view, and so does what is said of it
    seen = "const t = layout()[0], y = $('stage').getBoundingClientRect().top + t.y + cursor.r * t.step, d = $('detail').getBoundingClientRect();"
    assert browser.run(seen + "return [cursor.r, y > 0 && y + t.step < innerHeight, d.bottom <= innerHeight + 1]") == [
        63,
        True,
        True,
    ]
    assert browser.run("return $('detail').textContent").startswith("rank 63")
    browser.painted("$('find').value = '0F0'; search(); go(1)")  # the match is in the first row
    assert browser.run(seen + "return y > 0 && y + t.step < innerHeight")
    clean(browser, page)


def test_ranks_that_do_the_same_share_their_data(browser: Browser, tmp_path: Path) -> None:
    """64 planned ranks of four pipeline stages: four lists of 4,000 spans in the file, and every row is drawn and found."""
    memory = tuple(((0.0, 1e9), (500.0 + pipe, 2e9)) for pipe in range(4))
    spans = tuple(
        tuple(PageSpan(i, i + 0.9, "FBGS"[i % 4], f"{pipe}F{i} unit{i}", 7 << 20) for i in range(4000))
        for pipe in range(4)
    )
    rows = tuple(Row(f"rank {r}", spans[r // 16]) for r in range(64))
    page = tmp_path / "p.html"
    write_page(page, "64 ranks", "", [Panel("planned", rows, memory=tuple(memory[r // 16] for r in range(64)))])
    assert page.stat().st_size < 1_000_000
    begin = time.monotonic()
    browser.open(page)
    print(f"opened in {time.monotonic() - begin:.2f} s")
    assert browser.run("return data.panels[0].rows.map(r => r.lanes[0].n + r.lanes[2].n)") == [4000] * 64
    assert browser.run("return data.panels[0].memory.map(m => m.length)") == [4] * 64
    assert (
        browser.painted("$('find').value = 'unit7'; search(); $('find').value = 'unit77'; search()")["found"]
        == "704 found"
    )
    move = "const b = canvas.getBoundingClientRect(), put = (x, y) => canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + x, clientY: b.top + y, bubbles: true}))"
    middle = "zoom(1e-3, MAX * 4.4 / 4000); draw()"
    hover = browser.painted(
        f"scrollTo(0, 0); {middle}; {move}; const l = layout()[0]; put(X(MAX * 4.4 / 4000), l.y + 18 * l.step + 3)"
    )
    assert "forward, rank 18" in hover["tip"]
    assert hover["tip"].startswith("1F4 unit4")
    clean(browser, page)
