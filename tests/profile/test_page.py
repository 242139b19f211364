"""The page of a profile: complete in itself, and drawn by a real browser without an error or a request."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from recipe.profile.report import as_json, as_page, write_report
from recipe.profile.savings import find_savings
from recipe.profile.summary import Summary, summarise
from recipe.profile.trace_file import find_traces, read_traces
from recipe.profile.transfers import Links
from tests.profile_traces import gpu_events, write_gpu_traces, write_trace

FIGURES = ("ranks", "layers", "transfers", "bandwidth", "imbalance", "memory")
START_S = 60.0


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    traces = read_traces(find_traces([write_gpu_traces(tmp_path / "traces")]))
    return summarise(traces, links=Links(within=40e6))


def test_the_page_holds_its_data_and_asks_for_nothing(summary: Summary, tmp_path: Path) -> None:
    summary = summary._replace(facts={"model": "</script><b>&"})
    page = write_report(summary, folder=tmp_path / "new").page.read_text()
    assert not re.search(r"(src|href)=\"(?!data:,)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "{{" not in page
    assert page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None
    assert json.loads(data[1]) == json.loads((tmp_path / "new" / "profile.json").read_text())
    assert "default-src 'none'" in page


def test_the_json_says_all_that_the_page_shows(summary: Summary) -> None:
    content = as_json(summary)
    assert content["step_s"] == pytest.approx(1e-3)
    assert [saving["title"] for saving in content["savings"]] == [s.title for s in find_savings(summary)]
    route = {"op": "reduce_scatter", "purpose": "attention", "among": "2 ranks", "between": False}
    assert content["transfers"][0]["route"] == route
    rank = content["timeline"]["ranks"][0]
    start_s, end_s, part, num_operators, name = rank["work"][0]
    assert (start_s, end_s, num_operators) == (1e-4, 3e-4, 1)
    assert content["timeline"]["parts"][part] == {"kind": "attention", "layer": 0, "phase": "forward"}
    assert content["timeline"]["names"][name] == "nvjet_tst_128x256"
    assert rank["transfers"][1][2] == "reduce_scatter"
    assert rank["transfers"][1][5:] == [5e-5, 1.5e-4, 1e-4]


class Browser:
    """A headless chromium, by the WebDriver protocol."""

    def __init__(self, port: int) -> None:
        self._port = port
        options = {"args": ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1400"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, page: Path) -> None:
        self._ask("POST", f"{self._session}/url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """ "browser" is the console, "performance" every event of the network; entries are given once."""
        entries: list[dict[str, Any]] = self._ask("POST", f"{self._session}/se/log", {"type": kind})
        return entries

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=START_S)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        assert not (isinstance(value, dict) and "error" in value), value
        return value


@pytest.fixture
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    assert driver is not None, "these tests need chromedriver: apt-get install chromium chromium-driver"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        opened = Browser(port)
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait(START_S)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("chromedriver did not start")


def requests_of(browser: Browser) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.mark.browser
def test_a_browser_draws_every_chart_without_an_error_or_a_request(
    summary: Summary, browser: Browser, tmp_path: Path
) -> None:
    page = write_report(summary, folder=tmp_path).page
    browser.open(page)
    assert browser.run("return document.documentElement.dataset.drawn") == "true"
    for name in FIGURES:
        marks = browser.run(f"return document.querySelectorAll('#{name} svg [data-tip]').length")
        assert marks >= 2, name
        words = browser.run(f"return document.querySelector('#{name}').textContent")
        assert "NaN" not in words
        assert "undefined" not in words
    colours = "return new Set(new Uint32Array(document.querySelector('#timeline canvas').getContext('2d')"
    assert browser.run(f"{colours}.getImageData(0, 0, 900, 90).data.buffer)).size") > 6
    titles = browser.run("return [...document.querySelectorAll('.saving h3')].map(title => title.textContent)")
    assert titles == [saving.title for saving in find_savings(summary)[:3]]
    assert "link 40 MB/s" in browser.run("return document.querySelector('#bandwidth').textContent")
    # What is drawn is what was counted: 100 us of the gather are exposed on both ranks.
    tips = browser.run("return [...document.querySelectorAll('#transfers [data-tip]')].map(bar => bar.dataset.tip)")
    assert any("all_gather for attention" in tip and "100 µs of a step moving" in tip for tip in tips)
    assert browser.log("browser") == []
    assert [url for url in requests_of(browser) if not url.startswith("data:")] == [page.as_uri()]
    # A picture from elsewhere would be seen, and is not let in.
    browser.run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    [refused] = browser.log("browser")
    assert "Content Security Policy" in refused["message"]


@pytest.mark.browser
def test_the_page_answers_to_its_reader(summary: Summary, browser: Browser, tmp_path: Path) -> None:
    browser.open(write_report(summary, folder=tmp_path).page)
    browser.run("document.querySelectorAll('#phases button')[2].click()")
    assert browser.run("return document.querySelector('#phases [aria-pressed=true]').textContent") == "backward"
    assert "experts" not in browser.run("return document.querySelector('#layers .legend').textContent")
    browser.run("document.querySelector('#zoom button:nth-child(2)').click()")
    assert browser.run("return timeline.to - timeline.from < timeline.end * 0.7")
    browser.run("timeline.canvas.dispatchEvent(new KeyboardEvent('keydown', {key: '0'}))")
    assert browser.run("return timeline.from === 0 && timeline.to === timeline.end")
    browser.run(
        "const box = timeline.canvas.getBoundingClientRect(); scrollTo(0, box.top);"
        "const at = timeline.canvas.getBoundingClientRect();"
        "timeline.canvas.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: at.left + "
        "timeline.place(0.0002), clientY: at.top + 30}))"
    )
    assert browser.run("return tip.textContent").startswith("attention, layer 0, forward\n200 µs from 100 µs")
    assert browser.log("browser") == []


@pytest.mark.browser
def test_a_page_with_hardly_anything_in_it_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """One rank, no layers, no transfers, no memory; then sixteen times as many ranks as the charts have rows for."""
    bare = [e for e in gpu_events(0) if e["cat"] == "kernel" and "nccl" not in e["name"]]
    summary = summarise(read_traces([write_trace(tmp_path / "bare.json", bare)]), links=Links())
    browser.open(write_report(summary, folder=tmp_path / "bare").page)
    assert browser.run("return document.querySelectorAll('.nothing').length") >= 3
    many = as_json(summary)
    many["ranks"] = list(range(1024))
    for row in [*many["time"], *many["imbalance"]]:
        row["seconds"] = [row["seconds"][0] * (1 + rank / 4096) for rank in many["ranks"]]
    (tmp_path / "many.html").write_text(as_page(many))
    browser.open(tmp_path / "many.html")
    assert browser.run("return document.documentElement.dataset.drawn") == "true"
    assert "the slowest among them" in browser.run("return document.querySelector('#ranks').textContent")
    assert browser.log("browser") == []
