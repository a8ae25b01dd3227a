"""Reading a log: in pieces cut anywhere, with colours, binary, endless lines and half ones, and never much memory."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.doctor import logscan, signatures

KNOWN = signatures.load()
HANDLE = b"RuntimeError: CUDA error: invalid resource handle"
UNKNOWN = b"Unknown vLLM environment variable detected: VLLM_%s"
FAIL = b"FAIL port-free  port 8000 is taken\n       next: ./inv up --port 8001\n       read: docs/reference/checks.md\n"
ERROR = "✗ the model is gone\n  why:  first line\n        second line\n  next: ./inv model.fetch x\n".encode()


def problems(*chunks):
    return [(hit.signature.id, hit.line, hit.count) for hit in logscan.scan(chunks, KNOWN)]


def test_the_first_line_is_told_and_the_others_are_counted():
    assert problems(b"a\nb\n" + HANDLE + b"\nc\n" + HANDLE + b"\n") == [("invalid-resource-handle", 3, 2)]


def test_a_last_line_without_its_end_counts():
    assert problems(b"a\n" + HANDLE) == [("invalid-resource-handle", 2, 1)]


DEAD = b"(APIServer pid=7) ERROR 11-21 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: see above\n"
TOLD_TO_END = b"(APIServer pid=7) INFO 11-21 [launcher.py:254] [shutdown] API server: shutdown triggered\n"


def test_an_engine_that_was_told_to_end_is_no_problem_and_one_that_died_before_is():
    assert problems(TOLD_TO_END + b"a\n" + DEAD) == []
    assert problems(TOLD_TO_END, b"x" * (2 << 20) + b"\n", DEAD) == []
    assert problems(DEAD + TOLD_TO_END + DEAD) == [("engine-core-failed", 1, 1)]


@given(st.data())
def test_where_the_bytes_are_cut_does_not_matter(data):
    log = b"a\n" * 3 + HANDLE + b"\n" + ERROR + b"b\n" + FAIL + UNKNOWN % b"X" + b"\nend"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=6)))
    chunks = [log[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(log)], strict=True)]
    assert problems(*chunks) == problems(log)
    assert len(problems(log)) == 4


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_no_bytes_make_it_fail(chunks):
    logscan.scan(chunks, KNOWN)


@given(st.text(alphabet="✗ FAILwhynext:\n ab", max_size=200))
def test_no_broken_block_makes_it_fail(text):
    logscan.scan([text.encode()], KNOWN)


@pytest.mark.parametrize(
    "line",
    [
        b"\x1b[31mRuntimeError:\x1b[0m CUDA error: invalid \x1b[1;4mresource\x1b[0m handle",
        b"\x1b]8;;http://x\x07CUDA error: invalid resource handle\x1b]8;;\x07",
        b"\xff\xfe\x00 CUDA error: invalid resource handle \x00",
        b"progress 10%\rprogress 20%\rCUDA error: invalid resource handle\r",
    ],
    ids=["colours", "a link", "no text", "a progress bar"],
)
def test_what_surrounds_it_does_not_hide_it(line):
    assert problems(b"a\n" + line + b"\n") == [("invalid-resource-handle", 2, 1)]


def test_a_line_that_does_not_end_is_looked_at_in_parts_that_overlap():
    for before in (logscan.LONGEST - len(HANDLE), logscan.LONGEST - 35, 3 * logscan.LONGEST - 10, 5000):  # 35: across
        log = b"a\n" + b"x" * before + HANDLE + b"y" * logscan.LONGEST
        assert ("invalid-resource-handle", 2) in {problem[:2] for problem in problems(log)}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log():
    def endless(piece):
        for _ in range(24):
            yield piece

    for piece in (b"INFO all is well\n" * 60_000, b"\0" * 1_000_000, (HANDLE + b"\n") * 2_000):
        tracemalloc.start()
        logscan.scan(endless(piece), KNOWN)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12_000_000  # bytes, of 24 MB that were read


def test_different_answers_are_kept_apart_up_to_a_bound():
    log = b"\n".join(UNKNOWN % str(number).encode() for number in range(50))
    names = [hit.groups["name"] for hit in logscan.scan([log], KNOWN)]
    assert names == [f"VLLM_{number}" for number in range(logscan.DIFFERENT)]


@pytest.mark.parametrize("code", ["", " [input.model]", " [input]"])
def test_an_error_of_ours_is_read_with_its_reason_and_its_next_command(code):
    error = ERROR.replace(b"gone", f"gone{code}".encode())
    (hit,) = logscan.scan([b"x\n" + error + b"INFO more\n"], KNOWN)
    assert (hit.signature.id, hit.line) == ("own-error", 2)
    assert hit.groups == {"told": "the model is gone", "why": "first line; second line", "next": "./inv model.fetch x"}


def test_a_refusal_of_the_validator_is_read_with_its_fix():
    (hit,) = logscan.scan([b"validate\n" + FAIL], KNOWN)
    assert hit.groups["check"] == "port-free"
    assert hit.groups["next"] == "./inv up --port 8001"


@pytest.mark.parametrize(
    "text", ["✗ software-fp4: x.cubin\n✗ trap-stub: y\n", "✗ half\n  why:  cut off here", "FAIL x\nINFO y\n"]
)
def test_what_only_looks_like_an_error_of_ours_is_left_alone(text):
    assert problems(text.encode()) == []


def test_what_is_kept_of_a_line_is_bounded():
    (hit,) = logscan.scan([b"z" * 5000 + HANDLE], KNOWN)
    assert len(hit.text) == logscan.SHOWN
