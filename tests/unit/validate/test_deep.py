"""Deep facts: a child that crashes, hangs or has no answers does not end the validator. torch and vllm are fakes."""

import signal
from dataclasses import replace

import pytest
from programs import write_files

from validate import Options, ValidationVerdict, run
from validate.checks.finding import Status
from validate.facts import child

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
    """A folder with a fake torch for CUDA 13.0, and a fake vllm that has only a platform."""
    files = {"torch.py": "class version:\n    cuda = '13.0'\n", "vllm/__init__.py": ""}
    return write_files(tmp_path, {**files, "vllm/platforms/__init__.py": PLATFORM})


def gathered(target, packages, environment, **more):
    return child.gather(target(environ=environment(PYTHONPATH=str(packages)), **more), child.DEEP)[0]


def test_each_question_has_its_own_answer_also_without_the_patch(target, packages, environment):
    facts = gathered(target, packages, environment)
    assert set(facts) == set(child.SOURCES)
    assert facts["deep.torch_cuda"].value == "13.0"
    assert facts["deep.platform"].value == "FakePlatform"
    assert facts["deep.capability"].value == "12.1"
    assert facts["deep.is_blackwell_class"].value is True
    assert facts["deep.quantization"].error.startswith("ModuleNotFoundError")
    text = PLATFORM.replace("def is_blackwell_class(): return True", "def other(): return None")
    (packages / "vllm" / "platforms" / "__init__.py").write_text(text)
    assert "the patch is not applied" in gathered(target, packages, environment)["deep.is_blackwell_class"].error


@pytest.mark.parametrize(
    ("body", "why"),
    [("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", f"was killed by signal {signal.SIGSEGV:d}"),
     ("import os; os.write(2, b'no driver\\n'); os._exit(7)", "ended with code 7: no driver"),
     pytest.param("import time; time.sleep(600)", "did not answer within 10 s", marks=pytest.mark.slow)],
)  # fmt: skip
def test_facts_before_a_crash_or_hang_are_kept(target, packages, environment, body, why):
    (packages / "vllm" / "platforms" / "__init__.py").write_text(body)
    facts = gathered(target, packages, environment, deep_seconds=10.0 if "sleep" in body else 120.0)
    assert facts["deep.torch_cuda"].value == "13.0"
    assert all(why in facts[name].error for name in child.SOURCES if name != "deep.torch_cuda")


COUNTED = "from pathlib import Path\nPath(__file__).with_name('imports').open('a').write('x')\n"


@pytest.mark.parametrize(("ends", "imports"), [("", 1), ("import os; os._exit(9)", 3), ("import os; os.abort()", 3)])
def test_vllm_is_imported_once_unless_the_import_ends_the_process(target, packages, environment, ends, imports):
    write_files(packages, {"vllm/engine/arg_utils.py": COUNTED + ends})
    asked = target(model=packages, environ=environment(PYTHONPATH=str(packages)))
    facts, seconds = child.gather(asked, child.DEEP, child.DEEP)
    assert facts["deep.torch_cuda"].value == "13.0"
    assert (packages / "vllm" / "engine" / "imports").read_text() == "x" * imports
    assert ("child process" in facts["deep.attention_backend"].error) is bool(ends)
    assert min(seconds) > 0


def test_a_fork_that_could_not_use_the_gpu_is_a_new_process(target, packages, environment):
    (packages / "torch.py").write_text(
        f"{COUNTED}class version:\n    cuda = '13.0'\nclass cuda:\n    is_initialized = lambda: True\n"
    )
    assert gathered(target, packages, environment)["deep.torch_cuda"].value == "13.0"
    assert (packages / "imports").read_text() == "xx"


def test_interpreter_that_is_none(target, tmp_path):
    facts, _ = child.gather(target(python=tmp_path / "none", environ={}), child.DEEP)
    assert all("cannot run" in fact.error for fact in facts.values())


def test_deep_facts_and_layers_are_asked_for_only_where_profile_or_user_need_them(packages, good, environment):
    (packages / "vllm" / "platforms" / "__init__.py").write_text(COUNTED)
    options = Options(environ=environment(PYTHONPATH=str(packages)))
    run("embedded", options)
    assert not (packages / "vllm" / "platforms" / "imports").exists()
    for wanted in (False, True):
        report = run("embedded", replace(options, layers=wanted), good("embedded"))
        assert [f.required for f in report.findings if f.check == "layers"] == [False] * wanted


def test_no_deep_is_never_green(environment, good):
    report = run("spark", Options(environ=environment(), deep=False), good("spark"))
    assert {f.check for f in report.of(Status.SKIPPED)} == {
        "cuda-memory-uncounted", "gpu-clock", "blackwell-class", "moe-backend", "dense-kernels", "attention-backend",
        "numerics", "layers",
    }  # fmt: skip
    assert report.verdict is ValidationVerdict.INCOMPLETE
    assert report.error().exit_code == 30
