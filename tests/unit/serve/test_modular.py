"""Command lines for Modular's MAX."""

import socket
import sys
from contextlib import suppress

import misbehaving
import pytest

from sparkforge.cli.modular import checkpoint_of
from sparkforge.core import openai
from sparkforge.core.errors import InputError, ServerError, UsageError
from sparkforge.core.paths import state
from sparkforge.serve import environment, launch, modular, proof, record, status


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    return tmp_path


@pytest.fixture
def up(checkpoint, free_port, monkeypatch):
    """Return the function `modular.up`, with a small server in MAX's place that behaves as told."""

    def up(behaviour="good"):
        port = free_port()
        program = [sys.executable, misbehaving.__file__, str(port), behaviour, '["", {}]']
        shell = ["/bin/sh", "-c", f"exec {' '.join(map(repr, program))}", "max"]  # the added flags are for MAX
        monkeypatch.setattr(modular, "serve_command", lambda *_: shell)
        return modular.up(checkpoint, "cpu", port, 256)

    state().mkdir(exist_ok=True)
    monkeypatch.setattr(openai, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(environment, "prepare", lambda *_: modular.MAX)
    yield up
    with suppress(ServerError):
        launch.stop()


def test_up_records_a_server_that_answers_what_max_has(up):
    server = up("fails at top_logprobs")  # one of the calls that only vLLM is asked
    assert (server.device, server.profile, set(server.proof)) == ("max", "cpu", set(modular.CALLS))
    assert tuple(name for name in proof.CALLS if name in modular.CALLS) == modular.CALLS
    assert record.running() == server
    report, _ = status.report(server)
    assert "proved: a chat, a completion" in "\n".join(status.lines(report))


def test_up_leaves_nothing_of_a_server_that_does_not_answer(up):
    with pytest.raises(ServerError, match="no kernel image is available"):
        up("cannot generate")
    assert record.read() is None


def test_the_cpu_serves_in_float32_on_the_loopback_address(checkpoint, free_port):
    port = free_port()
    command = [str(word) for word in modular.serve_command(checkpoint, "cpu", port, 256)]
    assert command[1:4] == ["serve", "--model-path", str(checkpoint)]
    pairs = dict(zip(command[2::2], command[3::2], strict=True))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == str(port)
    assert pairs["--max-length"] == "256"
    assert pairs["--quantization-encoding"] == "float32"
    assert pairs["--custom-architectures"].endswith(":spark_mxfp4.max.architecture")


def test_a_gpu_keeps_the_checkpoint_s_format(checkpoint, free_port):
    assert "--quantization-encoding" not in modular.serve_command(checkpoint, "gpu", free_port(), 4096)
    assert modular.compile_command(checkpoint, "sm_121a")[-1] == "cuda:sm_121a"


def test_a_gpu_of_80_gb_has_room_for_the_large_model(checkpoint, free_port):
    command = modular.serve_command(checkpoint, "gpu", free_port(), 4096)
    assert command[command.index("--device-memory-utilization") + 1] == "0.98"


@pytest.mark.parametrize(("device", "warned"), [("cpu", False), ("gpu", True)])
def test_a_gpu_s_answers_are_warned_of(checkpoint, free_port, capsys, device, warned):
    modular.serve_command(checkpoint, device, free_port(), 512)
    assert ("no other GPU was tried" in " ".join(capsys.readouterr().err.split())) is warned


def test_telemetry_and_the_hub_are_off():
    variables = modular.variables()
    assert variables["MODULAR_TELEMETRY_ENABLED"] == "0"
    assert variables["MAX_SERVE_DISABLE_TELEMETRY"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "1"


def test_what_does_not_exist_is_refused_by_name(checkpoint, tmp_path_factory, free_port):
    with pytest.raises(UsageError, match="tpu"):
        modular.serve_command(checkpoint, "tpu", free_port(), 512)
    with pytest.raises(UsageError, match="sm_80"):
        modular.compile_command(checkpoint, "sm_80")
    with pytest.raises(UsageError, match="tpu"):
        modular.test("tpu")
    with pytest.raises(InputError, match=r"config\.json"):
        modular.serve_command(tmp_path_factory.mktemp("empty"), "cpu", free_port(), 512)


@pytest.mark.parametrize(
    ("port", "context", "message"), [(0, 512, "0 is no port"), (70_000, 512, "70000"), (None, 0, "--context 0")]
)
def test_numbers_that_max_cannot_serve_with_are_refused(checkpoint, free_port, port, context, message):
    with pytest.raises(UsageError, match=message) as refused:
        modular.serve_command(checkpoint, "cpu", free_port() if port is None else port, context)
    assert refused.value.fix.startswith("./inv max.serve")


def test_a_repository_of_this_machine_is_found_by_its_name(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--openai--gpt-oss-120b" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert checkpoint_of("openai/gpt-oss-120b") == snapshot
    assert checkpoint_of("") == modular.tiny_or("")
    with pytest.raises(InputError, match="gpt-oss-20b"):
        checkpoint_of("openai/gpt-oss-20b")


def test_without_a_name_it_is_the_tiny_model(checkpoint):
    assert modular.tiny_or("") == state() / "models" / "tiny-gpt-oss"
    assert modular.tiny_or(str(checkpoint)) == checkpoint


def test_compiled_models_are_kept_in_the_state_unless_the_user_says_where(monkeypatch):
    monkeypatch.delenv("MODULAR_CACHE_DIR", raising=False)
    assert modular.variables()["MODULAR_CACHE_DIR"] == str(state() / "cache" / "max")
    monkeypatch.setenv("MODULAR_CACHE_DIR", "/elsewhere")
    assert modular.variables()["MODULAR_CACHE_DIR"] == "/elsewhere"


def test_a_port_that_is_taken_is_refused_before_max_is_brought(checkpoint, free_port):
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ServerError, match=f"port {port} is taken") as refused,
    ):
        modular.serve_command(checkpoint, "cpu", port, 512)
    assert refused.value.fix == f"./inv max.serve --port {port + 1}"
