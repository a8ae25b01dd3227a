"""The ledger as data, verdicts on its claims, a report, and accepting a report. No server is started."""

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import ledger as accepted
from sparkforge.core import paths
from sparkforge.core.console import Steps
from sparkforge.core.errors import InputError, RefusalError, ServerError
from sparkforge.plan.speed import Measured
from sparkforge.qualify import ledger, report
from sparkforge.qualify.ledger import Claim
from sparkforge.qualify.report import Outcome, Qualification
from sparkforge.serve.record import StartPlan
from validate.checks.finding import View
from validate.facts.fact import Fact, load_sheet

SHEET = Path(__file__).parents[1] / "validate" / "sheets" / "gb10-from-public-documents.json"
GB10 = "NVIDIA GB10, 12.1, 580.126.09"


def test_every_row_of_the_ledger_has_a_unique_id_and_a_source_or_test():
    claims = ledger.load().claims
    assert len({claim.id for claim in claims}) == len(claims)
    assert [claim.id for claim in claims if not (claim.source or (claim.how == "open" and claim.settled_by))] == []


@pytest.mark.parametrize(
    ("claim", "outcome", "capability", "verdict"),
    [
        ({}, {"verdict": "held"}, "9.0", "held"),
        ({}, {"verdict": "differs"}, "12.1", "differs"),
        ({}, None, "12.1", "could not run"),
        ({"model": "gpt-oss-120b"}, {"verdict": "held", "model": "tiny-gpt-oss"}, "12.1", "could not run"),
        ({"between": (119, 122)}, {"verdict": "held", "figure": 119.7}, "12.1", "held"),
        ({"between": (119, 122)}, {"verdict": "held", "figure": 64}, "12.1", "differs"),
        ({"between": (119, 122)}, {"verdict": "held", "figure": 119.7}, "9.0", "could not run"),
    ],
)
def test_a_claim_is_judged_by_its_outcome(claim, outcome, capability, verdict):
    row = Claim(id="x", claim="x", how="open", settled_by="numerics", **claim)
    outcomes = {"numerics": Outcome(evidence="seen", **outcome)} if outcome else {}
    assert report.judge(row, outcomes, capability).verdict == verdict


class FakeDevice:
    """A fake device with an environment: its validator finds `status`, and its server does not start."""

    python, environment = "/nowhere/python", SimpleNamespace(name="embedded")

    def __init__(self, name="embedded", status="pass", evidence="0.3 %"):
        self.name, self.plan, self.steps = name, StartPlan(name), Steps(1)
        self.finding = {"check": "numerics", "status": status, "evidence": evidence}
        self.error = ServerError("the first answers are wrong", "other tokens", "", code="server.reply")
        self.calls = []

    def prepare(self):
        pass

    def validate(self):
        self.calls.append("machine")
        path = paths.state() / "validation.json"
        path.write_text(json.dumps({"schema": 1, "facts": {}, "findings": [self.finding]}))

    def launch(self):
        self.calls.append("tiny")
        raise self.error


@pytest.fixture
def qualify(tmp_path):
    def run(device, **options):
        return report.qualify(Qualification(device, None, tmp_path / "qualify", (64, 16)), **options)

    return run


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    def prints(text, power="[N/A]"):
        program.write_text(f'#!{sys.executable}\nimport sys\nprint({text!r} if "name" in sys.argv[1] else {power!r})\n')
        program.chmod(0o755)

    return prints


def test_a_killed_run_continues_and_what_could_not_run_runs_again(qualify, tmp_path):
    device = FakeDevice()
    device.error, usual = KeyboardInterrupt(), device.error
    with pytest.raises(KeyboardInterrupt):
        qualify(device)
    device.error = usual
    first = qualify(device)
    assert device.calls == ["machine", "tiny", "tiny"]
    verdicts = {name: outcome.verdict for name, outcome in first.outcomes.items()}
    assert (verdicts["numerics"], verdicts["first-answers"]) == ("held", "differs")
    assert {verdicts[name] for name in ("kernels", "memory-guard", "gate", "power")} == {"could not run"}
    assert "no CUDA memory here" in first.outcomes["memory-guard"].evidence
    qualify(device)
    assert device.calls[3:] == []
    qualify(device, again=True)
    assert device.calls[3:] == ["machine", "tiny"]
    for damaged in ("[", "[]", '{"inputs": 1}', '{"inputs": "x", "parts": {"tiny": 3}}'):
        (tmp_path / "qualify" / "progress.json").write_text(damaged)
        assert qualify(device).outcomes.keys() == first.outcomes.keys()
    assert "claims of the hardware ledger" in (tmp_path / "qualify" / "report.html").read_text()


def test_a_report_names_no_person_and_no_place(qualify, tmp_path):
    qualify(FakeDevice(evidence="/home/ada/models/x at ada@example.org, key hf_" + "a" * 34))
    text = (tmp_path / "qualify" / "report.json").read_text()
    assert "ada" not in text
    assert "a" * 34 not in text


@pytest.fixture
def files(tmp_path):
    return shutil.copy(ledger.FILE, tmp_path / "hardware.toml"), tmp_path / "hardware.md"


@pytest.mark.parametrize(("status", "verdict"), [("pass", "held"), ("fail", "differs")])
def test_a_sparks_report_is_written_into_ledger_and_page(qualify, gpu, files, tmp_path, status, verdict):
    gpu(GB10)
    qualify(FakeDevice("gpu", status, '0.3 % "off" \\'))
    file, page = files
    before, path = file.read_text().splitlines(), tmp_path / "qualify" / "report.json"
    count = accepted.accept(path, *files)
    assert accepted.accept(path, *files) == count  # a second time changes nothing
    claims = ledger.load(file).claims
    (claim,) = (claim for claim in claims if claim.settled_by == "numerics")
    assert (claim.spark.verdict, claim.spark.evidence) == (verdict, '0.3 % "off" \\')
    changed = [line for line in file.read_text().splitlines() if line not in before]
    assert [line[:7] for line in changed] == ["spark ="] * count
    assert f"**{count} of {len(claims)} claims were run on a DGX Spark**" in page.read_text()
    assert f". *12.1*: {verdict}, 0.3 %" in page.read_text()


def test_reports_that_settle_nothing_are_refused(qualify, gpu, files, tmp_path):
    before, path = files[0].read_bytes(), tmp_path / "qualify" / "report.json"
    gpu("NVIDIA H100, 9.0, 580.126.09")
    qualify(FakeDevice("gpu"))
    with pytest.raises(RefusalError, match="settles nothing"):
        accepted.accept(path, *files)
    for text in ("{}", "no JSON", "[" * 100_000, '{"schema": 1, "rows": NaN}', "\x00"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError):
            accepted.accept(tmp_path / "bad.json", *files)
    with pytest.raises(InputError, match="cannot read"):
        accepted.accept(tmp_path / "absent.json", *files)
    assert files[0].read_bytes() == before


def test_a_speed_is_compared_with_the_plan_of_the_gpu():
    sheet = load_sheet(SHEET)
    measured = Measured(1024, 256, 1, 800.0, 20.0)
    outcome = report.against_plan(View(sheet), measured)
    assert outcome.figure == pytest.approx(50)
    assert "of the computed ceiling" in outcome.evidence
    unknown = View({**sheet, "gpu.name": Fact("NVIDIA A100", "a test")})
    assert report.against_plan(unknown, measured).verdict == "could not run"


@pytest.mark.parametrize("power", ["40.5", "[N/A]"])
def test_power_is_sampled_until_a_load_ends_or_there_is_no_figure(gpu, power):
    gpu(GB10, power)
    with report.sample_power(0.001) as watts:
        deadline = time.monotonic() + (20.0 if power == "40.5" else 0.1)
        while not watts and time.monotonic() < deadline:
            time.sleep(0.001)
    assert set(watts) == ({40.5} if power == "40.5" else set())
