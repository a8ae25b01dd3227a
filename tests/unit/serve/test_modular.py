"""Command lines for Modular's MAX."""

import pytest

from sparkforge.core.errors import InputError, UsageError
from sparkforge.serve import modular


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_the_cpu_serves_in_float32_on_the_loopback_address(checkpoint):
    command = [str(word) for word in modular.serve_command(checkpoint, "cpu", 8005, 256)]
    assert command[1:4] == ["serve", "--model-path", str(checkpoint)]
    pairs = dict(zip(command[2::2], command[3::2], strict=True))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "8005"
    assert pairs["--max-length"] == "256"
    assert pairs["--quantization-encoding"] == "float32"
    assert pairs["--custom-architectures"].endswith(":spark_mxfp4.max.architecture")


def test_a_gpu_keeps_the_checkpoint_s_format(checkpoint):
    assert "--quantization-encoding" not in modular.serve_command(checkpoint, "gpu", 8000, 4096)
    assert modular.compile_command(checkpoint, "sm_121a")[-1] == "cuda:sm_121a"


def test_telemetry_and_the_hub_are_off():
    variables = modular.variables()
    assert variables["MODULAR_TELEMETRY_ENABLED"] == "0"
    assert variables["MAX_SERVE_DISABLE_TELEMETRY"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "1"


def test_what_does_not_exist_is_refused_by_name(checkpoint, tmp_path_factory):
    with pytest.raises(UsageError, match="tpu"):
        modular.serve_command(checkpoint, "tpu", 8000, 512)
    with pytest.raises(UsageError, match="sm_80"):
        modular.compile_command(checkpoint, "sm_80")
    with pytest.raises(InputError, match=r"config\.json"):
        modular.serve_command(tmp_path_factory.mktemp("empty"), "cpu", 8000, 512)
