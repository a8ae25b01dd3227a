"""The competition's command lines, by `./inv` and by the container's program, against a stub server."""

import json
import subprocess
import sys

import pytest

from sparkforge.bench import __main__ as program
from sparkforge.cli import program as inv
from sparkforge.core.paths import ROOT

SMALL = ["--warmups", "0", "--silence", "60"]


@pytest.fixture
def out(tmp_path, stub, monkeypatch):
    variables = {"MODEL": "org/honest-model", "PORT": stub.url.rpartition(":")[2], "TP": "2", "ISL": "24", "OSL": "8",
                 "CONC": "2", "MAX_MODEL_LEN": "64", "RANDOM_RANGE_RATIO": "1.0", "NUM_PROMPTS": "3",
                 "RESULT_FILENAME": "mine"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "out"


def results(folder):
    return {path.name: json.loads(path.read_text()) for path in folder.rglob("*.json") if path.name.startswith("r")}


@pytest.mark.parametrize("command", [["bench.perf"], ["bench.submit", "TEAM"]])
def test_long_options_take_one_dash(out, command):
    line = [*command, "-isl", "16", "-osl=4", "-conc", "1,2", *SMALL, "--output", str(out)]
    assert inv.main(line) == 0
    assert set(results(out)) == {"result_isl16_osl4_conc1.json", "result_isl16_osl4_conc2.json"}


@pytest.mark.parametrize("word", ["-ols", "-x", "-isl-"])
def test_a_misspelt_option_is_named_as_it_was_written(word, capsys):
    assert inv.main(["bench.perf", word, "3"]) == 2
    assert f"has no option {'-' if len(word) > 2 else ''}{word}" in capsys.readouterr().err


def test_acc_runs_the_gate_alone_also_with_the_shape_of_a_load(out, stub):
    assert inv.main(["bench.acc", "-isl", "1024", "-osl", "1024", "--tp", "1", "--output", str(out)]) == 0
    assert stub.streams == 0


# The container's program


def test_the_containers_program_runs_gate_and_load(out, stub, monkeypatch):
    monkeypatch.setenv("BENCH_URL", stub.url)
    monkeypatch.setenv("BENCH_MODEL", "honest-model")
    monkeypatch.setenv("PORT", "9")  # the port on the host, which BENCH_URL overrides
    assert program.main([*SMALL, "--output", str(out)]) == 0
    result = json.loads((out / "mine.json").read_text())
    taken = {name: result["config"][name] for name in ("model", "tp", "isl", "osl", "conc", "num_prompts")}
    assert taken == {"model": "honest-model", "tp": 2, "isl": 24, "osl": 8, "conc": 2, "num_prompts": 3}
    assert result["gate"]["passed"]
    stub.logprob = -9.0
    streams = stub.streams
    assert program.main(["perf", *SMALL, "--output", str(out)]) == 70
    assert stub.streams == streams  # a failed gate: no load


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["acc"], 0),
        (["submit", "Team", "-isl", "16", "-osl", "4", "-conc", "1", *SMALL], 0),
        (["fly"], 2),
        (["acc", "--fetch-text", "/nonexistent"], 10),
    ],
)
def test_the_containers_program_ends_with_the_errors_code(out, stub, monkeypatch, line, code):
    monkeypatch.setenv("BENCH_URL", stub.url)
    output = [] if line[0] == "fly" else ["--output", str(out)]
    assert program.main([*line, *output]) == code


def test_the_image_holds_what_the_program_imports():
    """The image has none of these packages, so the program must not import them."""
    code = (
        "import sys\n"
        "for name in ('invoke', 'tenacity', 'pypi_simple', 'docker'): sys.modules[name] = None\n"
        "import sparkforge.bench.__main__"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
