"""Deep facts: the child may crash, hang or know nothing, and the validator lives. A made-up torch and vllm stand in."""

import signal
from pathlib import Path

import pytest

from validate import Options, Verdict, deep, deep_child, run
from validate.bounded import entries
from validate.finding import Status

PLATFORM = """
class Capability:
    major, minor = 12, 1
class FakePlatform:
    @staticmethod
    def get_device_capability(): return Capability
    @staticmethod
    def is_blackwell_class(): return True
current_platform = FakePlatform
"""


@pytest.fixture
def packages(tmp_path):
    """A directory with a torch of CUDA 13.0 and a vllm that knows its platform and nothing else."""
    (tmp_path / "vllm" / "platforms").mkdir(parents=True)
    (tmp_path / "torch.py").write_text("class version:\n    cuda = '13.0'\n")
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "platforms" / "__init__.py").write_text(PLATFORM)
    return tmp_path


def gathered(scene, packages, environment, **more):
    return deep.gather(scene(environ=environment(PYTHONPATH=str(packages)), **more))


def test_each_question_has_its_own_answer(scene, packages, environment):
    facts = gathered(scene, packages, environment)
    assert set(facts) == set(deep.SOURCES)
    assert facts["deep.torch_cuda"].value == "13.0"
    assert facts["deep.platform"].value == "FakePlatform"
    assert facts["deep.capability"].value == "12.1"
    assert facts["deep.is_blackwell_class"].value is True
    assert facts["deep.quantization"].error.startswith("ModuleNotFoundError")


def test_platform_without_the_patch_says_so(scene, packages, environment):
    text = PLATFORM.replace("def is_blackwell_class(): return True", "def other(): return None")
    (packages / "vllm" / "platforms" / "__init__.py").write_text(text)
    assert "the patch is not applied" in gathered(scene, packages, environment)["deep.is_blackwell_class"].error


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", f"was killed by signal {signal.SIGSEGV:d}"),
        (
            "import sys; print('no driver', file=sys.stderr); sys.stderr.flush(); import os; os._exit(7)",
            "ended with code 7 before it could tell: no driver",
        ),
        ("import time; time.sleep(60)", "did not answer within 1.5 s"),
    ],
)
def test_crash_or_hang_keeps_what_was_told_before(scene, packages, environment, body, why):
    (packages / "vllm" / "platforms" / "__init__.py").write_text(body)
    facts = gathered(scene, packages, environment, deep_seconds=1.5)
    assert facts["deep.torch_cuda"].value == "13.0"
    assert all(why in facts[name].error for name in deep.SOURCES if name != "deep.torch_cuda")


def test_torch_that_exits_is_an_answer(scene, packages, environment):
    (packages / "torch.py").write_text("raise SystemExit('no libcudart')")
    assert gathered(scene, packages, environment)["deep.torch_cuda"].error == "SystemExit: no libcudart"


def test_interpreter_that_is_none(scene, tmp_path):
    facts = deep.gather(scene(python=tmp_path / "none", environ={}))
    assert all("cannot run" in fact.error for fact in facts.values())


def test_line_cut_by_death_is_left_out(tmp_path):
    (tmp_path / "a").write_text('{"name": "x", "source": "s", "value": 1, "error": null}\n{"name": "y", "sou')
    assert [told["name"] for told in entries(tmp_path / "a")] == ["x"]


def test_deep_facts_only_where_the_profile_needs_them(monkeypatch, environment):
    monkeypatch.setattr(deep, "gather", lambda _scene: pytest.fail("this profile asks nothing of torch or vllm"))
    run("embedded", Options(environ=environment()))


def test_no_deep_is_never_green(monkeypatch, environment, good):
    from validate import gate

    monkeypatch.setattr(gate.facts, "gather", lambda _scene, _groups: good("spark"))
    report = run("spark", Options(environ=environment(), deep=False))
    assert {f.check for f in report.of(Status.SKIPPED)} == {
        "blackwell-class",
        "moe-backend",
        "attention-backend",
        "numerics",
    }
    assert report.verdict is Verdict.INCOMPLETE
    assert report.error().exit_code == 32


def test_child_needs_nothing_of_ours():
    text = Path(deep_child.__file__).read_text()
    assert "import validate" not in text
    assert "from validate" not in text
    assert "sparkforge" not in text
