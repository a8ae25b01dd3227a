"""Command lines for Modular's MAX."""

import shlex
import sys
from contextlib import suppress
from dataclasses import replace

import misbehaving
import pytest
from programs import write_program

from sparkforge import environments, pins
from sparkforge.cli import program
from sparkforge.core import manifest
from sparkforge.core.errors import ServerError
from sparkforge.serve import launch, proof, record, status
from sparkforge.serve.devices import max_server
from sparkforge.serve.devices.device import start
from sparkforge.serve.record import StartPlan

PLAN = StartPlan("max", profile="cpu", variables={"MAX_MODEL_LEN": "256"})


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    return tmp_path


@pytest.fixture
def up(checkpoint, free_port):
    """Return a function that starts MAX's device, with a small server instead of MAX that behaves as requested."""
    inputs = environments.inputs(max_server.MAX, pins.load())
    manifest.once(max_server.MAX.path, environments.STAGE, inputs, lambda path: path.mkdir() or manifest.Made({}))

    def up(behaviour="good"):
        port = free_port()
        command = shlex.join([sys.executable, misbehaving.__file__, str(port), behaviour, '["", {}]'])
        write_program(max_server.MAX.path / "bin/max", f"exec {command}")
        return start(max_server.MaxServer(replace(PLAN, model=str(checkpoint), port=port)))

    yield up
    with suppress(ServerError):
        launch.stop()


def test_up_records_a_server_that_answers_what_max_has(up):
    server = up("fails at top_logprobs")  # one of the calls that are sent only to vLLM
    assert (server.device, server.profile, set(server.proof)) == ("max", "cpu", set(max_server.CALLS))
    assert tuple(name for name in proof.CALLS if name in max_server.CALLS) == max_server.CALLS
    assert record.running() == server
    report = status.report(server)
    assert "proved: a chat, a completion" in "\n".join(status.lines(report))


def test_a_cpu_serves_in_float32_and_a_gpu_in_the_checkpoint_s_format(checkpoint):
    plan = replace(PLAN, model=str(checkpoint), model_id="m", port=8123)
    commands = [max_server.server_command(replace(plan, profile=device)) for device in ("cpu", "gpu")]
    cpu, gpu = (dict(zip(command[2::2], command[3::2], strict=True)) for command in commands)
    assert (cpu["--host"], cpu["--port"], cpu["--max-length"]) == ("127.0.0.1", "8123", "256")
    assert cpu["--quantization-encoding"] == "float32"
    assert "--quantization-encoding" not in gpu
    assert gpu["--device-memory-utilization"] == "0.98", "gpt-oss-120b fits a GPU of 80 GB"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--context", "0"), "--context 0"),
        (("--port", "0"), "0 is not a port"),
        (("--model", "."), "no model in"),
        (("--model", "nobody/nothing"), "nobody/nothing is not on this machine"),
    ],
)
def test_unsupported_models_are_refused_before_max_is_installed(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(["max.up", *options])
    assert message in " ".join(capsys.readouterr().err.split())
