"""Each column of `lab.upstream check`, on made-up releases that break it."""

import json
import sys
from types import SimpleNamespace

import pytest
from expected import refused

from lab.patches import upstream
from lab.upstream import check as checking
from lab.upstream import releases, report
from lab.upstream.effect import Effect
from sparkforge.compile.flashinfer import sets
from sparkforge.core import files, paths
from sparkforge.core.errors import NetworkError, UsageError
from sparkforge.serve import profiles

NONE, CHANGED, UNKNOWN, BREAKS = Effect.NONE, Effect.CHANGED, Effect.UNKNOWN, Effect.BREAKS
CMAKE, CLI, ENVS = "CMakeLists.txt", "vllm/entrypoints/common/cli_args.py", "vllm/envs.py"
ENGINE, REQUIREMENTS, WRAPPERS = "vllm/engine/arg_utils.py", "requirements/cuda.txt", "vllm/utils/flashinfer.py"
CORE, GENERATOR = "flashinfer/fused_moe/core.py", "flashinfer/jit/moe.py"
CUTLASS = "FetchContent_Declare(\n  {name}\n  GIT_REPOSITORY https://example.org/{name}.git\n  GIT_TAG {tag}\n)\n"


def replaced(world, name, path, old, new):
    text = world.files[name][path]
    assert old in text
    return {path: text.replace(old, new)}


def texts(column, effect):
    return [entry.text for entry in column.observations if entry.effect is effect]


def test_the_pinned_release_again_breaks_nothing(world):
    world.python = sys.executable
    rows = {name: world.check(name) for name in ("vllm", "flashinfer")}
    for row in rows.values():
        assert row.can_move, report.CheckReport("s", "2026-01-01", (row,)).text()
        assert {part: column.effect for part, column in row.columns.items()} == dict.fromkeys(report.PARTS, NONE)
    assert rows["vllm"].columns["experts"].summary == "stock MARLIN; queue FLASHINFER_CUTLASS_MXFP4_MXFP8"
    assert not list((paths.state() / "upstream").iterdir()), "a folder stays"


GIT, CALLS, FLAGS = "git dependencies", "kernel calls", "flags and variables"
INIT, JIT = "flashinfer/__init__.py", "flashinfer/jit/cpp.py"
INTERLEAVE = "from .fused_moe import interleave as interleave\n"
# A change in a release: (upstream, file, old text, new text, column, its effect, words of an observation)
CASES = {
    "moves the patched line": ("vllm", "oracle", "import logging\n", "import logging\nimport json\n", "patches",
        CHANGED, "+1 lines"),
    "changes the patched line": ("vllm", "oracle", "CHOICE = 'MARLIN'", "CHOICE = 'TRITON'", "patches", BREAKS,
        "0001-change-something"),
    "does what Drop-when names": ("flashinfer", JIT, "jobs = None", "jobs = 1  # NOTHING OF THE KIND", "patches",
        CHANGED, "already upstream"),
    "moves a git dependency": ("vllm", CMAKE, "GIT_TAG v1", "GIT_TAG v2", GIT, CHANGED, "cutlass: tag v1 → v2"),
    "takes it from elsewhere": ("vllm", CMAKE, "example.org/cutlass", "example.com/cutlass", GIT, BREAKS,
        "cutlass: repository"),
    "adds one": ("vllm", CMAKE, "include(FetchContent)\n",
        "include(FetchContent)\n" + CUTLASS.format(name="new", tag="v7"), GIT, BREAKS,
        "new v7 from https://example.org/new.git (CMakeLists.txt:2) is new"),
    "takes another copy": ("vllm", CMAKE, "FetchContent_Declare", "if(NOT MY_SRC_DIR)\nendif()\nFetchContent_Declare",
        GIT, NONE, ""),
    "removes one": ("vllm", CMAKE, CUTLASS.format(name="cutlass", tag="v1"), "", GIT, CHANGED,
        "cutlass is no longer fetched"),
    "hides one": ("vllm", CMAKE, "GIT_TAG v1", "GIT_TAG ${X}", GIT, UNKNOWN, "cannot be followed"),
    "moves a call": ("vllm", "experts", "def apply", "\n\ndef apply", CALLS, CHANGED,
        "experts: {experts}:5 moved to line 7"),
    "writes a call otherwise": ("vllm", "experts", "return flashinfer_moe(", "y = flashinfer_moe(", CALLS, CHANGED,
        "written otherwise"),
    "stops calling": ("vllm", "experts", "flashinfer_moe(", "print(", CALLS, BREAKS, "vLLM calls it nowhere"),
    "passes what FlashInfer lacks": ("vllm", "experts", "scale=scale", "scale=scale, bias=1", CALLS, BREAKS,
        "it has no bias"),
    "passes too much": ("vllm", "vllm/sample.py", "inter(x), 1", "inter(x), 1, 2, 3", CALLS, BREAKS,
        "4 positional arguments, the call passes 5"),
    "passes too little": ("vllm", "experts", ", scale=scale", "", CALLS, BREAKS, "it needs scale as well"),
    "wraps it beyond recognition": ("vllm", WRAPPERS, "_wrap(", "_wrap(*", CALLS, UNKNOWN,
        "does not say which function of FlashInfer"),
    "renames FlashInfer's function": ("flashinfer", CORE, "def cutlass_fused_moe(input", "def fused_moe(input", CALLS,
        BREAKS, "no flashinfer.fused_moe.cutlass"),
    "needs another argument": ("flashinfer", CORE, "*, tune=False", "*, tune", CALLS, BREAKS, "it needs tune as well"),
    "offers another argument": ("flashinfer", CORE, "*, tune=False", "*, swap=None", CALLS, NONE, "+swap, -tune"),
    "drops a re-export": ("flashinfer", INIT, INTERLEAVE, "", CALLS, BREAKS, "no flashinfer.interleave"),
    "decides at run time": ("flashinfer", INIT, INTERLEAVE, "def __getattr__(name):\n    return 1\n", CALLS, UNKNOWN,
        "__getattr__"),
    "removes a generator": ("flashinfer", GENERATOR, "gen_module", "make_module", CALLS, BREAKS,
        "no flashinfer.jit.moe.gen_module"),
    "gives a generator other arguments": ("flashinfer", GENERATOR, "name, size, decl", "name, decl, more", CALLS,
        BREAKS, "it has no size"),
    "removes what a generator is given": ("flashinfer", GENERATOR, "DECLARATION", "TEXT", CALLS, BREAKS,
        "no flashinfer.jit.moe.DECLARATION"),
    "removes a flag": ("vllm", ENGINE, "--moe-backend", "--moe-backends", FLAGS, BREAKS,
        "no flag --moe-backend, which a uses; the nearest name there is --moe-backends"),
    "deprecates a flag": ("vllm", ENGINE, '"--max-num-seqs"', '"--max-num-seqs", deprecated=True', FLAGS, CHANGED,
        "is deprecated"),
    "removes a variable": ("vllm", ENVS, "VLLM_CUBIN", "VLLM_HAS_CUBIN", FLAGS, BREAKS,
        "no variable VLLM_CUBIN, which b uses"),
    "hides its variables": ("vllm", ENVS, "environment_variables", "variables", FLAGS, UNKNOWN, "variables"),
    "hides its parser": ("vllm", CLI, "make_arg_parser", "make_parser", FLAGS, UNKNOWN, "its flags"),
    "reads a kernel variable no more": ("flashinfer", GENERATOR, "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_ARCH", FLAGS,
        BREAKS, "reads FLASHINFER_CUDA_ARCH_LIST"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_change_has_its_effect_and_observation(world, case):
    name, path, old, new, part, effect, message = CASES[case]
    path = {"oracle": world.oracle, "experts": world.experts}.get(path, path)
    column = world.check(name, replaced(world, name, path, old, new)).columns[part]
    assert column.effect is effect, column
    assert message.format(experts=world.experts) in "\n".join(texts(column, effect))


def test_a_call_that_moved_to_another_file_is_named(world):
    text = world.files["vllm"][world.experts]
    column = world.check("vllm", {world.experts: None, "vllm/other.py": text}).columns[CALLS]
    assert "it is called in vllm/other.py:5 now" in texts(column, BREAKS)[0]


def test_vllm_is_checked_with_the_flashinfer_that_it_requires(world):
    world.release("flashinfer", "2.0", replaced(world, "flashinfer", CORE, "*, tune=False", "*, tune"))
    row = world.check("vllm", replaced(world, "vllm", REQUIREMENTS, "python==1.0", "python==2.0"))
    assert (row.checked_with, row.requires["flashinfer-python"]) == ("flashinfer-2.0", "2.0")
    assert row.columns[CALLS].effect is BREAKS


def test_a_required_flashinfer_that_is_not_there_leaves_the_calls_undetermined(world, monkeypatch):
    def absent(*_):
        raise NetworkError("cannot find it", "no such version", "wait", code="network.fetch")

    monkeypatch.setattr(upstream, "_listed", absent)
    column = world.check("vllm", replaced(world, "vllm", REQUIREMENTS, "python==1.0", "python==3.0")).columns[CALLS]
    assert (column.effect, "flashinfer-python 3.0" in column.reasons[0]) == (UNKNOWN, True)


# A change in a vLLM release: (file, old text, new text, effect on the experts, words of that observation)
RUNS = {
    "chooses by itself": ("oracle", "(CHOICE)", "('FLASHINFER_CUTLASS_MXFP4_MXFP8')", CHANGED,
        "no patch is needed for it"),
    "never chooses it": ("oracle", "(CHOICE)", "('MARLIN')", BREAKS,
        "with the queue: MARLIN, and 12.x needs FLASHINFER_CUTLASS"),
    "refuses": ("oracle", "return Backend", "raise ValueError('no')\n    return Backend", BREAKS,
        "with the queue: none (no)"),
    "cannot be imported": ("oracle", "import logging", "import logging, nothing_of_that_name", UNKNOWN,
        "nothing_of_that_name"),
    "moves its selector": ("oracle", "def select_mxfp4", "def choose_mxfp4", UNKNOWN, "select_mxfp4"),
    "dies": ("torch.py", "bfloat16 =", "import os\nos._exit(9)\nbfloat16 =", UNKNOWN, "was not run"),
    "prints at its end": ("vllm/__init__.py", "__version__",
        "import atexit\natexit.register(print, 1.5)\n__version__", UNKNOWN, "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_the_releases_own_selector_is_run(world, case):
    world.python = sys.executable
    path, old, new, effect, message = RUNS[case]
    path = world.oracle if path == "oracle" else path
    column = world.check("vllm", replaced(world, "vllm", path, old, new)).columns["experts"]
    assert column.effect is effect, column
    assert message in "\n".join(texts(column, effect))


def test_a_queue_that_does_not_apply_leaves_only_the_stock_answer(world):
    world.python = sys.executable
    column = world.check("vllm", replaced(world, "vllm", world.oracle, "\n\nCHOICE =", "\nCHOICE =")).columns["experts"]
    assert (column.summary, column.effect) == ("stock MARLIN; queue not determined", UNKNOWN)
    assert column.reasons == ["with the queue: it does not apply (0001-change-something.patch)"]


def test_without_an_interpreter_the_experts_stay_undetermined_and_the_move_is_refused(world):
    row = world.check("vllm")
    assert not row.can_move
    assert row.columns["experts"].reasons == ["the selector was not run: no code is run"]
    assert row.columns[FLAGS].effect is NONE


def test_an_interpreter_that_imports_another_vllm_is_refused(world, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/other exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "other/vllm").mkdir(parents=True)
    (tmp_path / "other/vllm/__init__.py").write_text('__version__ = "7"\n')
    world.python = python
    column = world.check("vllm").columns["experts"]
    assert f"imports another vLLM: {tmp_path}/other/vllm" in column.reasons[0]


def test_the_parser_refuses_a_value(world):
    world.python = sys.executable
    column = world.check("vllm", replaced(world, "vllm", ENGINE, '["auto", "x"]', '["auto", "y"]')).columns[FLAGS]
    (text,) = texts(column, BREAKS)
    assert text.startswith("the release's own parser refuses the profile a: ")
    assert "invalid choice: 'x'" in text
    assert column.summary.endswith("1 of 2 profiles parsed")


def test_no_secret_reaches_the_releases_code(world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    world.python = sys.executable
    spy = "import os\nassert 'HF_TOKEN' not in os.environ\n__version__"
    row = world.check("vllm", replaced(world, "vllm", "vllm/__init__.py", "__version__", spy))
    assert row.columns["experts"].effect is NONE


@pytest.fixture
def command(world, use_pins, monkeypatch):
    use_pins(world.table)
    monkeypatch.setattr(sets, "load", {"1.0": world.kernels}.__getitem__)
    monkeypatch.setattr(profiles, "load", lambda stack: {"s": world.profiles}[stack])
    monkeypatch.setattr(checking, "PATCHES", world.patches)
    return lambda *against, **options: checking.check_stack("s", against, **options)


def test_the_report_is_a_table_or_json_and_says_whether_all_can_move(world, command, capsys):
    world.release("flashinfer", "1.1", {"flashinfer/jit/cpp.py": None})
    assert command("flashinfer-1.0") is True
    assert "flashinfer-1.0: can move" in capsys.readouterr().out
    assert command("flashinfer-1.0", "flashinfer-1.1") is False
    output = capsys.readouterr().out
    assert "flashinfer-1.1: cannot move\n  ✗ patches: 0001-change-something.patch: conflicts" in output
    assert command("flashinfer-1.1", as_json=True) is False
    document = json.loads(capsys.readouterr().out)
    (row,) = document["releases"]
    assert (document["can_move"], row["can_move"], row["checked_with"]) == (False, False, "vllm-1.0")
    assert row["columns"]["patches"]["effect"] == "breaks"
    assert "| flashinfer-1.1 | ✗ 1 conflict | ✓ none |" in report.markdown(document)
    assert "- flashinfer-1.1, patches: 0001-change-something.patch: conflicts" in report.markdown(document)


def test_the_newest_source_archive_is_checked_unless_another_is_named(world, command, monkeypatch, capsys):
    world.release("flashinfer", "1.10")
    world.release("vllm", "1.10")
    rows = (("1.9", "sdist"), ("1.10", "sdist"), ("1.11rc1", "sdist"), ("1.12", "wheel"), ("1.13", "sdist"))
    pages = [SimpleNamespace(version=v, package_type=kind, is_yanked=v == "1.13") for v, kind in rows]
    monkeypatch.setattr(releases, "project_page", lambda package, http: SimpleNamespace(packages=pages))
    assert command(python=sys.executable) is True
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(": can move")]
    assert lines == ["vllm-1.10: can move", "flashinfer-1.10: can move"]


def test_remains_of_a_killed_check_are_removed_and_only_one_check_runs(world, command):
    left = releases.work_folder() / "tmp1"
    left.mkdir(parents=True)
    assert command("flashinfer-1.0") is True
    assert not left.exists()
    with files.locked(paths.state() / "upstream.lock", "check upstream releases"), refused("storage.busy"):
        command("flashinfer-1.0")


@pytest.mark.parametrize(
    ("name", "path", "part"),
    [("flashinfer", CORE, CALLS), ("vllm", ENVS, FLAGS), ("vllm", "vllm/sample.py", CALLS)],
)
def test_a_file_in_a_newer_python_leaves_its_part_undetermined(world, name, path, part):
    column = world.check(name, {path: world.files[name][path] + "def f(: pass\n"}).columns[part]
    assert (column.effect, path in column.reasons[0]) == (UNKNOWN, True)


def test_invalid_arguments_are_refused(command, monkeypatch, tmp_path):
    with refused("input.pins", "no patches for torch"):
        command("torch-2.0")
    monkeypatch.setenv("SPARKFORGE_OFFLINE", str(tmp_path))
    with refused("network.fetch", "cannot look for a newer"):
        command()
    for python in (tmp_path / "python", tmp_path):
        with pytest.raises(UsageError, match="cannot be run"):
            command(python=str(python))
