"""Traces of torch's profiler, and `bench.profile` on a stub that answers as vLLM's profiler routes do.

decode-step.pt.trace.json.gz is one decoding step of two requests, cut from a trace of the embedded device (vLLM 0.32.0,
torch 2.13.0, tiny model): every operator and phase of the step, without arguments and host name.
gpu-step.pt.trace.json.gz has operators of a layer and of sampling (torch 2.11.0) and the experts of spark_mxfp4 on an
H200, cut in the same way.
"""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
from expected import refused

from lab import profile, trace
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.process import started_at
from sparkforge.serve import command_line, record
from sparkforge.serve.record import Server

RECORDED = Path(__file__).with_name("decode-step.pt.trace.json.gz")


def event(name, begin, length, category="cpu_op", thread=1):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": length}


@pytest.fixture
def read(tmp_path):
    def read(*events):
        path = tmp_path / "x.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return trace.read(path)

    return read


def shares(breakdown):
    return {group.name: round(group.share, 3) for group in breakdown.groups if group.ms}


def test_a_recorded_step_is_classified_completely():
    breakdown = trace.read(RECORDED)
    assert (breakdown.processor, breakdown.events) == ("cpu", 1965)
    parts = {group.name: group for group in breakdown.groups}
    assert list(parts)[-2:] == ["other", "waiting"]
    assert parts["other"].ms == 0
    assert all(parts[name].ms > 0 for name in ("experts", "attention", "dense", "sampling", "copies", "waiting"))
    assert sum(group.share for group in breakdown.groups) == pytest.approx(1)
    assert sum(group.ms for group in breakdown.groups) == pytest.approx(breakdown.window_ms)
    assert breakdown.operators == sorted(breakdown.operators, key=lambda row: -row.ms)
    heaviest = [(row.name, row.group, row.calls) for row in breakdown.operators[:2]]
    # qkv, output and router of 4 layers, and the LM head; the experts' products belong to their own phase.
    assert heaviest == [("_C::onednn_mm", "dense", 13), ("aten::addmm", "experts", 26)]


def test_calls_of_experts_and_sampling_count_for_them_and_gaps_as_waiting(read):
    breakdown = read(
        event("spark_mxfp4::moe", 0, 50, "user_annotation"),
        event("aten::addmm", 0, 40),
        event("gpu_model_runner: sample", 50, 30, "user_annotation"),
        event("aten::topk", 60, 20),
        event("aten::addmm", 80, 20),
    )
    assert shares(breakdown) == {"experts": 0.4, "sampling": 0.2, "dense": 0.2, "waiting": 0.2}
    assert [(row.name, row.group) for row in breakdown.operators].count(("aten::addmm", "dense")) == 1


def test_with_a_gpu_its_kernels_count_and_the_cpu_does_not(read):
    breakdown = read(
        event("aten::mm", 0, 1000),
        event("kernel_unified_attention_2d", 0, 10, "kernel", 7),
        event("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", 5, 10, "kernel", 13),  # half overlaps the previous kernel
        event("void marlin_moe_wna16::Marlin<__nv_bfloat16>", 25, 60, "kernel", 7),
        event("mystery_kernel", 90, 5, "kernel", 7),
    )
    assert breakdown.processor == "gpu"
    assert {group.name: group.ms for group in breakdown.groups if group.ms} == {
        "experts": 0.06, "attention": 0.01, "dense": 0.005, "other": 0.005, "waiting": 0.015,
    }  # fmt: skip


def test_a_recorded_step_of_a_gpu_is_classified_completely():
    breakdown = trace.read(RECORDED.with_name("gpu-step.pt.trace.json.gz"))
    assert (breakdown.processor, breakdown.events) == ("gpu", 42)
    groups = {row.name: row.group for row in breakdown.operators}
    assert "other" not in groups.values()
    assert {name for name, group in groups.items() if group == "experts"} == {
        name for name in groups if "spark::" in name
    }


def packed(value):
    return gzip.compress(json.dumps(value).encode())


BROKEN = {
    "no JSON": (b"PK\x03\x04", "it is no"),
    "cut gzip": (packed({"traceEvents": []})[:-9], "its gzip stream is damaged"),
    "no events": (packed({"traceEvents": 3}), "it has no list of traceEvents"),
    "a list of texts": (packed({"traceEvents": ["x"]}), "event 0 is no object"),
    "no time": (packed({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}), "event 0 has no valid name"),
    "nothing ran": (packed({"traceEvents": [event("a phase", 0, 1, "user_annotation")]}), "it holds no operator"),
    "a bomb": (gzip.compress(bytes(trace.LARGEST + 1), 1), "unpacked; profile fewer tokens"),
}


@pytest.mark.parametrize(("data", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_trace_is_one_clear_error(tmp_path, data, why):
    (tmp_path / "broken.json.gz").write_bytes(data)
    with refused("input.trace", why):
        profile.run({"trace": str(tmp_path / "broken.json.gz"), "output": str(tmp_path)})


def test_each_pattern_matches_its_examples_first():
    table = trace.load_table()
    groups = table.groups.keys() - {trace.OTHER, trace.WAITING}
    for row in table.patterns:
        assert row.group in groups
        assert [table.first(row.processor, example) for example in row.examples] == [row] * len(row.examples)


@pytest.fixture
def own(stub):
    """The stub, recorded as this checkout's server; stopping its profiler writes the recorded trace."""
    port = int(stub.url.rpartition(":")[2])
    record.write(Server(os.getpid(), started_at(os.getpid()), "127.0.0.1", port, "", "honest-model", "embedded", ""))

    def write(_body):
        command_line.traces_folder().mkdir(exist_ok=True)
        prefix = [body["profile_prefix"] for path, body, _ in stub.bodies if path == profile.START][-1]
        shutil.copy(RECORDED, command_line.traces_folder() / f"{prefix}_rank0.1.pt.trace.json.gz")

    stub.acts[profile.STOP] = write
    return {"port": str(port), "isl": "16", "osl": "4", "conc": "2"}


def test_a_server_is_profiled_under_load_and_its_trace_kept(stub, own, tmp_path, capsys):
    profile.run({**own, "output": str(tmp_path)})
    folder = Path(capsys.readouterr().out.strip())
    order = [path for path, _, _ in stub.bodies if path != "/tokenize"]
    assert order == [*["/v1/completions"] * 2, profile.START, *["/v1/completions"] * 2, profile.STOP]
    saved = profile.TraceProfile.model_validate_json((folder / "profile.json").read_text())
    assert [path.name for path in folder.glob("*.gz")] == [saved.trace] == list(saved.traces)
    assert (saved.config.isl, saved.config.osl, saved.config.conc, saved.config.num_prompts) == (16, 4, 2, 2)
    assert saved.server.version == "0.0-stub"
    assert saved.machine["cores"] > 0
    assert list(command_line.traces_folder().iterdir()) == []


def test_what_cannot_be_profiled_is_refused_and_the_profiler_is_stopped(stub, own, tmp_path):
    options = {**own, "output": str(tmp_path)}
    stub.post_answers = [404]
    with pytest.raises(ServerError, match=r" · \./inv down && \./inv up --profiler$"):
        profile.run(options)
    assert stub.asked[profile.STOP] == 0
    stub.status, stub.fail_from = 500, stub.asked["/v1/completions"] + 2  # after the warm-up
    with pytest.raises(ServerError, match="2 of 2 requests failed"):
        profile.run(options)
    assert stub.asked[profile.STOP] == 1
    record.forget()
    with pytest.raises(UsageError, match="cannot be profiled"):
        profile.run(options)
    assert stub.asked[profile.START] == 2


def test_the_traces_of_a_container_are_moved_out_of_it(docker_command):
    docker_command.answers("cp ")
    docker_command.answers("exec ")
    server = Server(0, 0.0, "127.0.0.1", 8000, "", "m", "docker", "", container="c0ffee")
    assert profile.collect(server) == command_line.traces_folder()
    assert docker_command.calls == [
        f"cp c0ffee:/var/cache/sparkforge/profiler/. {command_line.traces_folder()}",
        "exec c0ffee rm -r /var/cache/sparkforge/profiler",
    ]


def test_a_trace_from_elsewhere_is_shown_and_reported(tmp_path, capsys):
    profile.run({"trace": str(RECORDED), "output": str(tmp_path)})
    out, err = capsys.readouterr()
    saved = json.loads((Path(out.strip()) / "profile.json").read_text())
    assert (saved["trace"], saved["config"], saved["server"]) == (RECORDED.name, None, None)
    table = err.partition("heaviest operators")[2]
    assert len([line for line in table.splitlines() if "::" in line]) == profile.HEAVIEST
