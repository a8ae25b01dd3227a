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


def row(clock, power, temperature, busy, reasons, maximum="3003"):
    return dict(zip(gpus.STATE_FIELDS, (clock, maximum, power, "[N/A]", temperature, busy, reasons), strict=True))


IDLE_BIT, NOTHING, POWER_CAP, HOT, HARDWARE = (f"0x{bit:016x}" for bit in (1, 0, 4, 0x20, 0x88))


@pytest.mark.parametrize(
    ("state", "message", "fix"),
    [
        (row("208", "4.5", "38", "0", IDLE_BIT), "", ""),
        (row("208", "4.5", "38", "[N/A]", NOTHING), "", ""),
        (row("2405", "60", "70", "96", NOTHING), "", ""),
        (row("2405", "60", "70", "96", POWER_CAP), "", ""),
        (row("1400", "60", "70", "30", NOTHING), "", ""),
        (row("[N/A]", "[N/A]", "[N/A]", "96", "[N/A]"), "", ""),
        ({}, "", ""),
        (row("700", "14.2", "45", "96", NOTHING), "names no reason): SM clock 700 of 3003 MHz, 14 W, 45 °C", "60 s"),
        (row("650", "17", "50", "95", POWER_CAP), "half of its highest under load (software power cap)", "60 s"),
        (row("900", "30", "92", "99", HOT), "half of its highest under load (software thermal slowdown)", "cool"),
        (row("2100", "60", "92", "99", HOT), "the driver lowers the clock (software thermal", "cool"),
        (row("208", "5", "40", "0", HARDWARE), "hardware slowdown, hardware power brake", "60 s"),
        (row("700", "20", "45", "99", "0x2"), "(clock setting)", "-rgc"),
    ],
)
def test_a_clock_that_is_held_down_is_told_from_an_idle_gpu(state, message, fix):
    why, command = gpus.GpuState.read(state).fault()
    assert (message in why, fix in command) == (True, True)
    assert bool(why) == bool(command) == bool(message)


def test_an_older_driver_gives_the_figures_without_the_reasons(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    refused = 'Field "clocks_event_reasons.active" is not a valid field to query.'
    program.write_text(
        f"#!/bin/sh\ncase \"$*\" in *reasons*) echo '{refused}'; exit 2;; esac\necho '700, 3003, 14, [N/A], 45, 96'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    [state] = gpus.states()
    assert gpus.GpuState.read(state).fault()[0]
