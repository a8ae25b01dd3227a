"""nvidia-smi's output as tables; the validator's and the status's tests have what goes wrong."""

import pytest

from sparkforge.core import gpus


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi that gives two GPUs, with units unless it is asked for none."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nunit=' MiB'\ncase \"$*\" in *nounits*) unit=;; esac\n"
        'echo "NVIDIA H200, 143771$unit"; echo "NVIDIA H100 80GB HBM3, [N/A]"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(("units", "size"), [(True, "143771 MiB"), (False, "143771")])
def test_each_gpu_is_a_table_with_or_without_units(nvidia_smi, units, size):
    assert gpus.query("name", "memory.total", units=units) == [
        {"name": "NVIDIA H200", "memory.total": size},
        {"name": "NVIDIA H100 80GB HBM3", "memory.total": "[N/A]"},
    ]


@pytest.mark.parametrize(("text", "value"), [("143771", 143771.0), ("[N/A]", None), ("[Not Supported]", None)])
def test_a_figure_that_the_driver_has_not_is_none(text, value):
    assert gpus.number(text) == value
