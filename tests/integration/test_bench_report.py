"""The report in a real browser, from file://: no console error, sorts, fits a phone, light and dark."""

import base64
import itertools
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from websockets.sync.client import connect

from sparkforge.bench import baselines, report, schema

pytestmark = [pytest.mark.integration, pytest.mark.needs("chromium")]
SAMPLE = Path(__file__).parents[1] / "unit" / "bench" / "sample.json"  # the embedded model, measured
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
DESK = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
COLUMN = """(name) => {
  const table = [...document.querySelectorAll("table")].find((t) => t.caption.textContent.startsWith("%s"));
  const head = [...table.tHead.rows[0].cells].find((cell) => cell.textContent === name);
  head.querySelector("button").click();
  return [head.getAttribute("aria-sort"), [...table.tBodies[0].rows].map((r) => r.cells[head.cellIndex].textContent)];
}"""


class Browser:
    """Headless Chromium by its own protocol; remembers every complaint of the page."""

    def __init__(self, socket):
        self.socket, self.numbers, self.complaints, self.requested = socket, itertools.count(1), [], []
        self.loaded = False

    def call(self, method, **parameters):
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            response = self.receive()
            if response.get("id") == number:
                assert "error" not in response, response
                return response["result"]

    def receive(self):
        document = json.loads(self.socket.recv(timeout=60))
        name, parameters = document.get("method", ""), document.get("params", {})
        if name in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(parameters)
        if name == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        self.loaded = self.loaded or name == "Page.loadEventFired"
        return document

    def open(self, path, size, scheme):
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self.loaded:
            self.receive()

    def evaluate(self, expression):
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def picture(self, path):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        response = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(response["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    profile = tmp_path_factory.mktemp("chromium")
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    program = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        port, target = address(profile / "DevToolsActivePort", program)
        with connect(f"ws://127.0.0.1:{port}{target}", max_size=None, proxy=None) as socket:
            top = Browser(socket)
            page = top.call("Target.createTarget", url="about:blank")["targetId"]
        with connect(f"ws://127.0.0.1:{port}/devtools/page/{page}", max_size=None, proxy=None) as socket:
            yield Browser(socket)
    finally:
        os.killpg(program.pid, 15)
        program.wait(timeout=30)


def address(file, program):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and program.poll() is None:
        if file.exists() and len(lines := file.read_text().splitlines()) == 2:
            return lines
        time.sleep(0.05)
    pytest.fail("chromium did not start")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report of three concurrencies and a failed one."""
    sample, folder = schema.read(SAMPLE), tmp_path_factory.mktemp("pages")
    results = [shaped(sample, conc, factor) for conc, factor in ((4, 1.0), (8, 1.7), (16, 2.5))]
    lie = {"name": "x", "ok": False, "told": "HTTP 200 <b>without</b> a token"}
    bad = {**shaped(sample, 32, 1).model_dump(), "passed": False, "metrics": None, "requests": [], "checks": [lie]}
    results.append(schema.Result.model_validate(bad))
    report.write(folder / "report.html", results, baselines.load())
    return folder


def shaped(sample, conc, factor):
    result = sample.model_dump()
    result["config"] = {**result["config"], "conc": conc, "isl": 1024, "osl": 1024}
    result["metrics"] = {**result["metrics"], "tput_per_gpu": 400 * factor, "output_throughput": 200 * factor}
    result["metrics"]["e2el_ms"] = {"mean": 2000 * factor, "median": 2000 * factor, "p99": 2600 * factor}
    result["metrics"]["interactivity"] = 60 / factor
    result = schema.Result.model_validate(result)
    cited = baselines.compute_ratios(result.metrics, (1024, 1024, conc), baselines.load().figures)
    return result.model_copy(update={"ratios": cited})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_page_renders_without_a_complaint_and_fits(browser, pages, size, scheme):
    browser.complaints.clear()
    browser.requested.clear()
    browser.open(pages / "report.html", size, scheme)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(253, 253, 252)", "dark": "rgb(21, 24, 27)"}[scheme]
    assert browser.complaints == []
    assert {url.partition(":")[0] for url in browser.requested} <= {"file", "data"}
    if folder := os.environ.get("SCREENSHOTS"):
        width = size["width"]
        browser.picture(Path(folder) / f"report-{width}-{scheme}.png")


def test_a_press_on_a_head_sorts_figures_by_value(browser, pages):
    browser.open(pages / "report.html", DESK, "light")
    press = f"({COLUMN % 'latencies'})('in+out tok/s/GPU')"
    state, order = browser.evaluate(press)
    assert (state, order) == ("ascending", ["400.0", "680.0", "1,000", "-"])
    state, order = browser.evaluate(press)
    assert (state, order) == ("descending", ["1,000", "680.0", "400.0", "-"])  # a gap stays last


def test_words_are_sorted_by_alphabet_and_other_heads_forget(browser, pages):
    browser.open(pages / "report.html", DESK, "light")
    browser.evaluate(f"({COLUMN % 'none of this'})('cited')")
    state, order = browser.evaluate(f"({COLUMN % 'none of this'})('date')")
    assert state == "ascending"
    assert order == sorted(order)
    assert browser.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1


def test_a_servers_words_stay_words(browser, pages):
    browser.open(pages / "report.html", DESK, "light")
    assert browser.evaluate("document.querySelectorAll('b').length") == 0
    assert "HTTP 200 <b>without</b> a token" in browser.evaluate("document.body.innerText")


def test_every_control_can_be_reached_by_keyboard(browser, pages):
    browser.open(pages / "report.html", PHONE, "light")
    assert browser.evaluate(
        "[...document.querySelectorAll('th')].every((h) => h.querySelector('button').tabIndex === 0)"
    )
    sideways = "[...document.querySelectorAll('.scroll')].every((box) => box.tabIndex === 0)"
    assert browser.evaluate(sideways)
