"""Events in a log: levels, exceptions with their causes, crashes, orderly ends, and survived errors."""

import pytest

from sparkforge.core import events

TRACEBACK = """\
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]   File "a.py", line 3, in run
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]     raise ValueError("CUDA error: this is source")
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] KeyError: 'weights'
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] The above exception was the direct cause of the following exception:
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1]
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] vllm.x.LoadError: cannot load
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'E': 1}
"""


def test_the_decisive_line_is_the_last_exception_that_is_no_consequence():
    event = events.read_text(TRACEBACK)
    assert event.decisive.text == "vllm.x.LoadError: cannot load"
    assert [line.exception for line in event.chain(event.decisive)] == ["KeyError", "vllm.x.LoadError"]
    assert not [line for line in event.lines if "this is source" in line.text]


READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
BANNER = "(APIServer pid=1) INFO 11-21 07:30:52 [a.py:1] non-default args: {}\n"
FAILED = "(APIServer pid=1) ERROR 11-21 07:30:52 [a.py:1] the cache could not be read\n"
DEAD = "(APIServer pid=1) ERROR 11-21 07:30:52 [a.py:1] EngineCore encountered a fatal error.\n"
END = "(APIServer pid=1) INFO 11-21 07:30:52 [launcher.py:254] [shutdown] API server: shutdown triggered\n"


@pytest.mark.parametrize(
    ("log", "faults"),
    [
        (READY, 0),
        (FAILED, 1),
        (FAILED + READY, 0),  # survived
        (FAILED + BANNER + READY, 1),  # the server ended and was restarted
        (DEAD + READY, 1),
        (READY + END + DEAD, 0),
        (READY + DEAD + END, 1),
        ("INFO 11-21 07:30:52 [logger.py:1] Received request: prompt: 'CUDA error: illegal memory access'\n", 0),
    ],
)
def test_survived_errors_are_no_faults_but_crashes_are(log, faults):
    assert len(events.read_text(log).faults) == faults


LOST = """ERROR 11-21 07:30:52 [core.py:1] ValueError: the reason
Exception ignored in: <function WeakMethod._cb at 0x7f>
Traceback (most recent call last):
TypeError: 'NoneType' object is not callable
"""
LATE = """(EngineCore pid=9) ValueError: the reason
(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
(APIServer pid=1) h11._util.LocalProtocolError: Too little data for declared Content-Length
"""
UV = "error: the reason\n  Caused by: a wrong hash\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (LOST, "ValueError: the reason"),
        (LATE, "ValueError: the reason"),
        (UV, "error: the reason Caused by: a wrong hash"),
        ("CMake Error at a.txt:4 (x):\n  the reason\n", "CMake Error at a.txt:4 (x): the reason"),
        (LOST.encode("utf-16"), "ValueError: the reason"),  # as PowerShell saves what it prints
        ("  5%|x | 1/22\r 10%|x | 2/22\rValueError: the reason\n", "ValueError: the reason"),
    ],
)
def test_the_decisive_line_is_found_in_every_form_and_before_what_followed(log, told):
    assert events.read([log if isinstance(log, bytes) else log.encode()]).decisive.told == told


def test_lines_that_differ_in_long_numbers_only_are_one_line():
    text = "".join(f"ERROR 11-21 07:30:{i % 60:02} [a.py:1] request {10_000 + i} failed\n" for i in range(5000))
    (line,) = events.read_text(text).lines
    assert line.count == 5000
