"""The ledger as data, what outcomes say of its claims, a report, and what is accepted of it. No server is started."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import ledger as accepted
from sparkforge.core import gpus
from sparkforge.core.console import Steps
from sparkforge.core.errors import InputError, RefusalError, ServerError
from sparkforge.plan import devices, speed
from sparkforge.qualify import ledger, parts, report
from sparkforge.qualify.ledger import Claim
from sparkforge.qualify.parts import Outcome, Qualification
from validate.facts.fact import load_sheet

SHEET = Path(__file__).parents[1] / "validate" / "sheets" / "gb10-from-public-documents.json"

LEDGER = """
schema = 1
head = "# A ledger\\n\\n{verified} Read on."
tail = "## Not known\\n\\nMuch."
[[sections]]
title = "Numbers"
text = "Some."
[[sections.rows]]
id = 'first'
claim = 'It computes'
how = 'cited'
source = 'a page'
date = '2026-11-21'
settled_by = 'numerics'

[[sections.rows]]
id = 'first-again'
claim = 'It is fast'
how = 'open'
settled_by = 'speed-1'
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A ledger and its page."""
    file, page = tmp_path / "hardware.toml", tmp_path / "hardware.md"
    file.write_text(LEDGER)
    monkeypatch.setattr(ledger, "FILE", file)
    monkeypatch.setattr(accepted, "PAGE", page)
    for function in (ledger.load, accepted.write_answers):
        defaults = (file,) if function is ledger.load else (file, page)
        monkeypatch.setattr(function, "__defaults__", defaults)
    return file, page


def test_every_row_of_the_ledger_has_an_id_of_its_own_and_a_source_or_what_settles_it():
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
    """Stands for a device whose environment is there."""

    name, python, plan = "embedded", "/nowhere/python", None
    environment = SimpleNamespace(name="embedded")

    def __init__(self):
        self.steps = Steps(1)

    def prepare(self):
        pass


@pytest.fixture
def qualification(tmp_path, files):
    return Qualification(FakeDevice(), None, tmp_path / "qualify", (64, 16))


def test_a_killed_run_continues_and_what_could_not_run_runs_again(qualification, monkeypatch):
    ran = []

    def part(name, verdict):
        def run(_qualification):
            ran.append(name)
            if name == "tiny" and ran.count(name) == 1:
                raise KeyboardInterrupt
            return {name: Outcome(verdict=verdict, evidence=name)}

        return run

    three = {"machine": "held", "kernels": "could not run", "tiny": "differs"}
    monkeypatch.setattr(report, "PARTS", {name: part(name, verdict) for name, verdict in three.items()})
    monkeypatch.setattr(parts, "PARTS", report.PARTS)
    with pytest.raises(KeyboardInterrupt):
        report.qualify(qualification)
    first = report.qualify(qualification)
    assert ran == ["machine", "kernels", "tiny", "kernels", "tiny"]
    assert {name: outcome.verdict for name, outcome in first.outcomes.items()} == three
    report.qualify(qualification, again=True)
    assert ran[5:] == ["machine", "kernels", "tiny"]
    for damaged in ("[", "[]", '{"inputs": 1}', '{"inputs": "x", "parts": {"tiny": 3}}'):
        (qualification.folder / "progress.json").write_text(damaged)
        assert report.qualify(qualification).outcomes == first.outcomes
    assert "claims of the hardware ledger" in (qualification.folder / "report.html").read_text()


def test_a_report_names_no_person_and_no_place(qualification, monkeypatch):
    secret = Outcome(verdict="held", evidence="/home/ada/models/x at ada@example.org, key hf_" + "a" * 34)
    monkeypatch.setattr(report, "PARTS", {"machine": None})
    monkeypatch.setattr(report, "run", lambda *_: {"numerics": secret})
    report.qualify(qualification)
    text = (qualification.folder / "report.json").read_text()
    assert "ada" not in text
    assert "a" * 34 not in text
    assert json.loads(text)["rows"][0]["verdict"] == "held"


def test_without_gpu_and_model_the_rest_says_why_and_an_error_is_an_outcome(qualification, monkeypatch):
    def fail(_qualification):
        raise ServerError("the tiny model's first answers are wrong", "other tokens", "", code="server.reply")

    monkeypatch.setitem(parts.PARTS, "tiny", fail)
    assert parts.run("tiny", qualification)["first-answers"].verdict == "differs"
    assert "no CUDA memory here" in parts.guard(qualification)["memory-guard"].evidence
    assert {outcome.verdict for outcome in parts.model(qualification).values()} == {"could not run"}
    assert parts.kernels(qualification)["kernels"].verdict == "could not run"


def report_of(qualification, monkeypatch, gpu, outcome="held"):
    monkeypatch.setattr(report, "PARTS", {"machine": None})
    monkeypatch.setattr(report, "run", lambda *_: {"numerics": Outcome(verdict=outcome, evidence='0.3 % "off" \\')})
    monkeypatch.setattr(report, "_gpu", lambda: gpu)
    qualification.tiny.name = "gpu"
    report.qualify(qualification, again=True)
    return qualification.folder / "report.json"


GB10 = {"name": "NVIDIA GB10", "compute_cap": "12.1", "driver_version": "580.126.09"}


@pytest.mark.parametrize("verdict", ["held", "differs"])
def test_a_sparks_report_is_written_into_ledger_and_page(qualification, files, monkeypatch, verdict):
    path = report_of(qualification, monkeypatch, GB10, verdict)
    before = files[0].read_text()
    assert accepted.accept(path) == 1
    assert accepted.accept(path) == 1  # a second time changes nothing
    answer = ledger.load().claims[0].spark
    assert (answer.verdict, answer.evidence) == (verdict, '0.3 % "off" \\')
    assert ledger.load().claims[1].spark is None
    changed = [line for line in files[0].read_text().splitlines() if line not in before.splitlines()]
    assert [line[:7] for line in changed] == ["spark ="]
    page = files[1].read_text()
    assert "**1 of 2 claims were run on a DGX Spark**" in page
    assert f". *12.1*: {verdict}, 0.3 %" in page


def test_reports_that_settle_nothing_are_refused(qualification, files, monkeypatch, tmp_path):
    before = files[0].read_bytes()
    h100 = report_of(qualification, monkeypatch, {**GB10, "name": "NVIDIA H100", "compute_cap": "9.0"})
    with pytest.raises(RefusalError, match="settles nothing"):
        accepted.accept(h100)
    nothing = report_of(qualification, monkeypatch, GB10, "could not run")
    with pytest.raises(RefusalError, match="settles nothing"):
        accepted.accept(nothing)
    for text in ("{}", "no JSON", "[" * 100_000, '{"schema": 1, "rows": NaN}', "\x00"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError):
            accepted.accept(tmp_path / "bad.json")
    with pytest.raises(InputError, match="cannot read"):
        accepted.accept(tmp_path / "absent.json")
    assert files[0].read_bytes() == before


def test_a_speed_is_compared_with_the_plan_of_the_gpu(monkeypatch):
    view = parts.View(load_sheet(SHEET))
    measured = speed.Measured(1024, 256, 1, 800.0, 20.0)
    outcome = parts._against_plan(view, measured)
    assert outcome.figure == pytest.approx(50)
    assert "of the computed ceiling" in outcome.evidence
    monkeypatch.setattr(devices, "by_gpu", lambda _name: None)
    assert parts._against_plan(view, measured).verdict == "could not run"


def test_power_is_sampled_while_a_load_runs(monkeypatch):
    monkeypatch.setattr(parts, "POWER_SECONDS", 0.001)
    answers = ["[N/A]", "40.5"]
    monkeypatch.setattr(gpus, "query", lambda *_args, **_options: [{"power.draw": answers.pop()}])
    with parts._watts() as watts:
        while answers:
            pass
    assert watts == [40.5]
