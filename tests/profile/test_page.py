"""The page of a profile: complete in itself, and drawn by a real browser without an error or a request."""

import gzip
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

from recipe.profile.report import TIMELINE_NAME, as_json, as_page, find_savings, write_report
from recipe.profile.summary import Summary
from recipe.profile.transfers import Links
from tests.profile_traces import gpu_events, kernel, take_apart, write_gpu_traces, write_trace

FIGURES = ("ranks", "layers", "transfers", "bandwidth", "imbalance", "memory")
START_S = 60.0


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    return take_apart(write_gpu_traces(tmp_path / "traces"))


def test_the_page_holds_the_json_and_asks_for_nothing(summary: Summary, tmp_path: Path) -> None:
    summary = summary._replace(facts={"model": "</script><b>&"})
    page = write_report(summary, folder=tmp_path / "new").read_text()
    assert not re.search(r"(src|href)=\"(?!data:,)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "{{" not in page
    assert page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None
    content = json.loads((tmp_path / "new" / "profile.json").read_text())
    assert json.loads(data[1]) == content
    assert "default-src 'none'" in page
    assert content["step_s"] == pytest.approx(1e-3)
    assert [saving["title"] for saving in content["savings"]] == [s.title for s in find_savings(summary)]
    route = {"op": "reduce_scatter", "purpose": "attention", "among": "2 ranks", "between": False}
    assert content["transfers"][0]["route"] == route
    assert content["timeline"] == TIMELINE_NAME


def test_the_timeline_is_one_file_of_all_ranks_for_perfetto(summary: Summary, tmp_path: Path) -> None:
    """As the Trace Event Format has it: complete slices in microseconds, which nest on each thread."""
    write_report(summary, folder=tmp_path)
    content = json.loads(gzip.decompress((tmp_path / TIMELINE_NAME).read_bytes()))
    events = content["traceEvents"]
    named = [e for e in events if e["ph"] == "M" and e["name"] in ("process_name", "thread_name")]
    names = {(e["pid"], e["tid"] if e["name"] == "thread_name" else None): e["args"]["name"] for e in named}
    assert [names[rank, None] for rank in range(2)] == ["rank 0", "rank 1"]
    slices = [e for e in events if e["ph"] == "X"]
    for thread in {(e["pid"], e["tid"]) for e in slices}:
        open_ends = [float("inf")]
        for one in sorted((e for e in slices if (e["pid"], e["tid"]) == thread), key=lambda e: (e["ts"], -e["dur"])):
            while open_ends[-1] <= one["ts"]:
                open_ends.pop()
            assert one["ts"] + one["dur"] <= open_ends[-1]
            open_ends.append(one["ts"] + one["dur"])
    mine = {(names[e["pid"], e["tid"]], e["name"]): e for e in slices if e["pid"] == 0}
    assert mine["steps", "step 7"]["dur"] == 1000
    part, operator = mine["work", "attention, layer 0, forward"], mine["work", "nvjet_tst_128x256"]
    assert [part["ts"], part["dur"]] == [operator["ts"], operator["dur"]] == [100, 200]
    assert part["cat"] == operator["cat"] == "attention"
    assert part["args"] == {"part": "attention", "layer": 0, "phase": "forward"}
    scatter = mine["transfers", "reduce_scatter for attention"]
    assert scatter["args"]["sent_bytes"] == 4000
    times = [scatter["args"][f"{name}_ms"] for name in ("hidden", "exposed", "waiting")]
    assert times == pytest.approx([0.05, 0.15, 0.1])
    waiting = mine["transfers", "waiting for slower ranks"]
    assert [waiting["cat"], waiting["ts"], waiting["dur"]] == ["waiting", 500, 100]
    assert mine["copies", "Memcpy DtoH (Device -> Pinned)"]["dur"] == 20
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == 6144


def test_slices_that_overlap_get_a_thread_each(tmp_path: Path) -> None:
    events = [*gpu_events(0), kernel("other_stream", 99, 150, 350, stream=8)]
    write_report(take_apart(write_trace(tmp_path / "rank-0.json", events)), folder=tmp_path)
    slices = json.loads(gzip.decompress((tmp_path / TIMELINE_NAME).read_bytes()))["traceEvents"]
    threads = {e["name"]: e["tid"] for e in slices if e["ph"] == "X"}
    assert threads["other_stream"] != threads["nvjet_tst_128x256"]
    assert {"work", "work 2"} <= {e["args"]["name"] for e in slices if e["name"] == "thread_name"}


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
    page = write_report(summary, folder=tmp_path)
    browser.open(page)
    assert browser.run("return document.documentElement.dataset.drawn") == "true"
    for name in FIGURES:
        marks = browser.run(f"return document.querySelectorAll('#{name} svg [data-tip]').length")
        assert marks >= 2, name
        words = browser.run(f"return document.querySelector('#{name}').textContent")
        assert "NaN" not in words
        assert "undefined" not in words
    link = "return [document.querySelector('#timeline').textContent, document.querySelector('#timeline').href]"
    assert browser.run(link) == [TIMELINE_NAME, (tmp_path / TIMELINE_NAME).as_uri()]
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
    browser.open(write_report(summary, folder=tmp_path))
    browser.run("document.querySelectorAll('#phases button')[2].click()")
    assert browser.run("return document.querySelector('#phases [aria-pressed=true]').textContent") == "backward"
    assert "experts" not in browser.run("return document.querySelector('#layers .legend').textContent")
    browser.run(
        "const bar = document.querySelector('#ranks [data-tip]'); bar.scrollIntoView();"
        "bar.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: 9, clientY: 9}))"
    )
    assert browser.run("return tip.textContent").startswith("rank 0: attention\n")
    assert browser.log("browser") == []


@pytest.mark.browser
def test_a_page_with_hardly_anything_in_it_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """One rank, no layers, no transfers, no memory; then sixteen times as many ranks as the charts have rows for."""
    bare = [e for e in gpu_events(0) if e["cat"] == "kernel" and "nccl" not in e["name"]]
    summary = take_apart(write_trace(tmp_path / "bare.json", bare), links=Links())
    browser.open(write_report(summary, folder=tmp_path / "bare"))
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
