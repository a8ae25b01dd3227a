"""MAX's benchmark against a stand-in for MAX, and the checkpoint of random weights, read back."""

import json
import stat
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from lab.served import dummy, max_serve, random_checkpoint

SERVER = """\
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = "a b c d"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if body.get("stream"):
            events = [{"choices": [{"text": "a"}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            pieces = [*(json.dumps(event) for event in events), "[DONE]"]
            self.wfile.write("".join(f"data: {piece}\\n\\n" for piece in pieces).encode())
        else:
            self.answer({"choices": [{"text": ANSWER}], "usage": usage})

    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass


print("arguments", json.dumps(sys.argv[1:]), flush=True)
if "--fail" in sys.argv:
    sys.exit("ValueError: Model size exceeds available memory")
if sys.argv[1] == "serve":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def arguments(tmp_path, free_port):
    program = tmp_path / "max"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    out = tmp_path / "out.json"
    return [
        str(tmp_path), "--max", str(program), "--out", str(out), "--port", str(free_port()), "--ready-seconds", "30",
        "--compiled", str(tmp_path / "compiled"),
    ]  # fmt: skip


def result(arguments):
    return json.loads(Path(arguments[arguments.index("--out") + 1]).read_text())


def started(arguments):
    """Return the arguments that the stand-in was started with."""
    log = Path(arguments[arguments.index("--out") + 1]).with_suffix(".log").read_text()
    (line,) = [line for line in log.splitlines() if line.startswith("arguments ")]
    return json.loads(line.removeprefix("arguments "))


def test_speed_has_a_row_for_each_length_and_concurrency_and_the_server_ends(arguments):
    load = ["--input", "5", "9", "--output", "7", "--concurrency", "1", "2", "--rounds", "2"]
    assert max_serve.main(["speed", *arguments, *load]) == 0
    rows = result(arguments)["rows"]
    assert [(row["input_tokens"], row["concurrency"], row["requests"]) for row in rows] == [
        (5, 1, 2), (5, 2, 4), (9, 1, 2), (9, 2, 4),
    ]  # fmt: skip
    assert all(row["complete"] and row["output_tokens"] == 7 for row in rows)
    command = started(arguments)
    assert command[command.index("--precompiled-mefs") + 1] == arguments[-1]
    program = arguments[arguments.index("--max") + 1]
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in running if program in command]


@pytest.mark.parametrize(
    ("texts", "leads", "equal", "code"),
    [
        (["a", "a b", "a b c", "a b c d"], [1.0] * 4, 4, True),
        (["a", "a b", "a b x", "a b x y"], [1.0, 1.0, 0.05, 1.0], 2, True),
        (["x", "x b", "x b c", "x b c d"], [0.2, 1.0, 1.0, 1.0], 0, False),
    ],
)
def test_tokens_may_part_where_the_reference_hardly_prefers_its_own(
    arguments, tmp_path, monkeypatch, texts, leads, equal, code
):
    monkeypatch.setattr(max_serve, "GENERATED", 4)
    (tmp_path / "reference.json").write_text(
        json.dumps({"rows": [{"prompt": [1, 2, 3], "texts": texts, "leads": leads}]})
    )
    assert max_serve.main(["tokens", *arguments, "--against", str(tmp_path / "reference.json")]) == 0
    found = result(arguments)
    assert found["passed"] is code
    assert found["rows"][0]["equal_tokens"] == equal
    assert found["rows"][0].get("lead_of_the_reference") == (leads[equal] if equal < 4 else None)


def test_a_refused_start_is_kept_with_maxs_own_words(arguments, capsys):
    assert max_serve.main(["speed", *arguments, "--format", "dequant", "--extra=--fail"]) != 0
    found = result(arguments)
    assert "Model size exceeds available memory" in found["error"]["why"]
    assert found["path"].startswith("MAX's own")
    assert "ended before it was ready" in capsys.readouterr().err


def test_compiling_and_serving_have_the_same_options(arguments, capfd):
    assert max_serve.main(["compile", *arguments]) == 0
    command = json.loads(capfd.readouterr().out.partition("arguments ")[2])
    assert max_serve.main(["speed", *arguments, "--concurrency", "1", "--input", "4", "--output", "2"]) == 0
    assert command[0] == "warm-cache"
    assert command[1 : command.index("--target")] == started(arguments)[1 : len(command[: command.index("--target")])]


@pytest.fixture
def small(monkeypatch):
    """Sizes of a small model in place of gpt-oss-20b's."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {**small, "num_hidden_layers": 4, "num_local_experts": 3, "vocab_size": 500}
    monkeypatch.setattr(dummy, "SIZES", {"20b": sizes})


def read(folder):
    """Return the file's tensors as numpy has them."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    types = {"U8": np.uint8, "BF16": np.uint16}
    read = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        read[name] = np.frombuffer(data[8 + size + begin : 8 + size + end], types[entry["dtype"]]).reshape(
            entry["shape"]
        )
    return read, data


@pytest.mark.usefixtures("small")
def test_a_random_checkpoint_has_the_models_tensors_no_two_weights_equal(tmp_path):
    for name in random_checkpoint.TOKENIZER:
        (tmp_path / name).write_text("{}")
    folder = random_checkpoint.write_checkpoint(tmp_path / "out", "20b", 2, tokenizer=tmp_path)
    tensors, data = read(folder)
    assert len(data) >= sum(tensor.nbytes for tensor in tensors.values())
    assert tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"].shape == (3, 192, 2, 16)
    scales = [tensor for name, tensor in tensors.items() if name.endswith("_scales")]
    low, high = random_checkpoint.SCALES
    assert all(low <= tensor.min() <= tensor.max() < high for tensor in scales)
    weights = [tensor.tobytes() for name, tensor in tensors.items() if tensor.ndim > 1 and "bias" not in name]
    assert len(set(weights)) == len(weights)
    values = (tensors["lm_head.weight"].astype(np.uint32) << 16).view(np.float32)
    assert values.std() == pytest.approx(random_checkpoint.DEVIATIONS["dense"], rel=0.05)
    assert "model.layers.2.mlp.router.weight" not in tensors
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.usefixtures("small")
def test_a_hole_is_as_long_as_the_weights(tmp_path):
    for name in random_checkpoint.TOKENIZER:
        (tmp_path / name).write_text("{}")
    lengths = []
    for hole in (False, True):
        folder = random_checkpoint.write_checkpoint(tmp_path / str(hole), "20b", tokenizer=tmp_path, hole=hole)
        lengths.append((folder / "model.safetensors").stat().st_size)
    assert lengths[0] == lengths[1]
    assert not any(read(folder)[1][-lengths[0] // 2 :])


def test_the_sizes_are_those_of_gpt_oss_120b():
    total = sum(tensor.size for _, tensor in random_checkpoint.tensors(dummy.config("120b")))
    assert 65.2e9 < total < 65.3e9


@pytest.mark.parametrize("arguments", [["--size", "7b"], ["--layers", "3"], ["--layers", "38"]])
def test_a_model_that_there_is_not_is_refused(tmp_path, arguments, capsys):
    assert random_checkpoint.main(["--output", str(tmp_path), *arguments]) == 2
    assert "there is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda given: ["speed", "/nonexistent", *given[1:]], "/nonexistent cannot be measured"),
        (lambda given: ["tokens", *given], "there is nothing to compare with"),
        (lambda given: ["tokens", *given, "--against", "/nonexistent.json"], "/nonexistent.json is no file"),
        (lambda given: ["compile", *given, "--max", "/nonexistent"], "there is no program /nonexistent"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(arguments, change, problem, capsys):
    assert max_serve.main(change(arguments)) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("out", "arguments", "problem"),
    [
        ("/proc/nowhere", [], "cannot write /proc/nowhere/model.safetensors"),
        ("here", ["--tokenizer", "/nonexistent"], "/nonexistent/chat_template.jinja"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_one_clear_error(tmp_path, out, arguments, problem, capsys):
    assert random_checkpoint.main(["--output", str(tmp_path / out), "--size", "20b", *arguments]) != 0
    assert problem in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "here").exists()
