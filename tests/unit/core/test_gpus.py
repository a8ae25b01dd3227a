"""nvidia-smi's output as tables; the tests of the validator and of status cover errors."""

import pytest

from sparkforge.core import gpus


def row(clock, power, temperature, busy, reasons, maximum="3003"):
    return dict(zip(gpus.STATE_FIELDS, (clock, maximum, power, "[N/A]", temperature, busy, reasons), strict=True))


IDLE_BIT, NOTHING, POWER_CAP, HOT, HARDWARE = (f"0x{bit:016x}" for bit in (1, 0, 4, 0x20, 0x88))


@pytest.mark.parametrize(
    ("state", "message", "fix"),
    [
        (row("208", "4.5", "38", "0", IDLE_BIT), "", ""),
        (row("2405", "60", "70", "96", NOTHING), "", ""),
        (row("1400", "60", "70", "30", NOTHING), "", ""),
        (row("700", "20", "45", "10", "0x2"), "", ""),
        (row("[N/A]", "[N/A]", "[N/A]", "96", "[N/A]"), "", ""),
        (row("700", "14.2", "45", "96", NOTHING), "names no reason): SM clock 700 of 3003 MHz, 14 W, 45 °C", "60 s"),
        (row("650", "17", "50", "95", POWER_CAP), "half of its highest under load (software power cap)", "60 s"),
        (row("2100", "60", "92", "99", HOT), "the driver lowers the clock (software thermal", "cool"),
        (row("208", "5", "40", "0", HARDWARE), "hardware slowdown, hardware power brake", "60 s"),
        (row("700", "20", "45", "99", "0x2"), "(clock setting)", "-rgc"),
    ],
)
def test_a_throttled_clock_is_distinguished_from_an_idle_gpu(state, message, fix):
    why, command = gpus.GpuState.read(state).fault()
    assert (message in why, fix in command) == (True, True)
    assert bool(why) == bool(command) == bool(message)
