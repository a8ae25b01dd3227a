"""The table of known problems, and those recognised in logs: a log for each, variations, healthy logs, odd input."""

import itertools
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.cli import namespace
from sparkforge.compile import ninja
from sparkforge.core import events
from sparkforge.core.errors import InputError, ProcessError
from sparkforge.doctor import signatures
from sparkforge.doctor.signatures import FactCondition

KNOWN = signatures.load()
HERE = Path(__file__).parent
UNKNOWN = signatures.UNKNOWN
HANDLE = b"RuntimeError: CUDA error: invalid resource handle"
VARIABLE = b"Unknown vLLM environment variable detected: VLLM_%s"
FAIL = b"FAIL port-free  port 8000 is taken\n       next: ./inv up --port 8001\n       read: docs/reference/checks.md\n"
ERROR = "✗ the model is gone\n  why:  first line\n        second line\n  next: ./inv pull x\n".encode()
# Pairs: a log of the first problem may also show the second.
ALSO = {
    ("killed", "engine-core-failed"),
    ("graph-replay-fault", "engine-core-failed"),
    ("grammar-failed", "engine-core-failed"),
    ("shared-memory-deleted", "engine-core-failed"),
    ("engine-core-failed", UNKNOWN),
}


def logs(name):
    text = (HERE / name).read_text(encoding="utf-8")
    return [section.partition("\n")[::2] for section in text.split("\n=== ")[1:]]


def shown(text):
    hits, unknown = signatures.recognise(events.read([text if isinstance(text, bytes) else text.encode()]), KNOWN)
    return [*dict.fromkeys(hit.signature.id for hit in hits), *([UNKNOWN] if unknown else [])]


def problems(*chunks):
    hits, _ = signatures.recognise(events.read(chunks), KNOWN)
    return [(hit.signature.id, hit.line.number, hit.count) for hit in hits]


def test_a_log_of_each_signature_shows_its_own_problem_and_no_other():
    recognised = [(name, shown(f"before\n{text}\nafter\n")) for name, text in logs("logs.txt")]
    assert {name for name, _ in recognised} == {signature.id for signature in KNOWN if signature.reads_logs}
    assert [(name, ids) for name, ids in recognised if name not in ids] == []
    assert {(name, other) for name, ids in recognised for other in ids if other != name} <= ALSO


PREFIXES = ("vllm-1  | \x1b[36m(EngineCore_DP0 pid=77)\x1b[0m ", "2026-11-24T10:00:00.123Z ", "#12 4.2 ")


def test_it_is_found_after_the_prefixes_of_other_programs():
    pairs = zip(itertools.cycle(PREFIXES), logs("logs.txt"), strict=False)
    prefixed = [(name, prefix + text) for prefix, (name, text) in pairs]
    assert [text for name, text in prefixed if name not in shown(text)] == []


def test_other_wordings_versions_and_neighbours_show_the_same():
    variations = logs("variations.txt")
    assert len(variations) >= 100
    assert [(expected, text) for expected, text in variations if expected not in shown(text)] == []


def test_a_healthy_log_shows_nothing():
    healthy = logs("healthy.txt")
    assert len(healthy) > 20
    assert [(text, ids) for _, text in healthy if (ids := shown(text))] == []


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=9) ERROR 11-21 07:30:52 [core.py:1] something new went wrong",
        "package.module.QuiteNewError: it broke",
        "NVRM: Xid (PCI:0000:01:00): 999, pid=1, name=x",
    ],
)
def test_a_fault_that_nobody_knows_is_unknown(line):
    assert shown(f"INFO 11-21 07:30:52 [a.py:1] fine\n{line}\nINFO 11-21 07:30:53 [a.py:1] bye\n") == [UNKNOWN]


def test_an_exception_without_a_message_is_told_with_its_place_or_its_next_line():
    frame = '  File "/opt/vllm/backend_xgrammar.py", line 165, in accept_tokens'
    for text, told in (
        (f"{frame}\n    assert done\nAssertionError\n", f"AssertionError, {frame.strip()}"),
        ("RuntimeError:\n        An attempt has been made\n", "RuntimeError: An attempt has been made"),
    ):
        assert events.read_text(text).decisive.told == told


def test_a_cause_takes_the_place_of_a_death_without_one():
    dead = "(APIServer pid=1) RuntimeError: Engine core initialization failed. Failed core proc(s): {}\n"
    assert shown(dead) == ["engine-died"]
    cause = "ValueError: No available memory for the cache blocks.\n"
    assert shown(cause + dead) == ["kv-cache-too-small", "engine-core-failed"]


DEAD = b"(APIServer pid=7) ERROR 11-21 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: see above\n"
TOLD_TO_END = b"(APIServer pid=7) INFO 11-21 [launcher.py:254] [shutdown] API server: shutdown triggered\n"


def test_an_engine_that_was_told_to_end_is_no_problem_and_one_that_died_before_is():
    assert problems(TOLD_TO_END + b"a\n" + DEAD) == []
    assert problems(TOLD_TO_END, b"x" * (2 << 20) + b"\n", DEAD) == []
    assert [problem[0] for problem in problems(DEAD + TOLD_TO_END + DEAD)] == ["engine-died"]


# Reading a log


def test_the_first_line_is_reported_the_others_are_counted_and_different_answers_kept_apart_up_to_a_bound():
    assert problems(b"a\nb\n" + HANDLE + b"\nc\n" + HANDLE + b"\n") == [("invalid-resource-handle", 3, 2)]
    log = b"\n".join(VARIABLE % str(number).encode() for number in range(50))
    names = [hit.groups["name"] for hit in signatures.recognise(events.read([log]), KNOWN)[0]]
    assert names == [f"VLLM_{number}" for number in range(signatures.DIFFERENT)]


@given(st.data())
def test_where_the_bytes_are_cut_does_not_matter(data):
    log = b"a\n" * 3 + HANDLE + b"\n" + ERROR + b"b\n" + FAIL + VARIABLE % b"X" + b"\nend"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=6)))
    chunks = [log[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(log)], strict=True)]
    assert problems(*chunks) == problems(log)
    assert len(problems(log)) == 4


def test_a_line_that_does_not_end_is_looked_at_in_pieces_that_overlap():
    for before in (events.TEXT - len(HANDLE), events.TEXT - 35, 3 * events.TEXT - 10, 5000):  # 35: in two pieces
        log = b"a\n" + b"x" * before + HANDLE + b"y" * events.TEXT
        assert ("invalid-resource-handle", 2) in {problem[:2] for problem in problems(log)}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log():
    def endless(piece):
        for _ in range(8):
            yield piece

    for piece in (b"INFO all is well\n" * 60_000, b"\0" * 1_000_000, (HANDLE + b"\n") * 2_000):
        tracemalloc.start()
        problems(*[piece[:10]])
        signatures.recognise(events.read(endless(piece)), KNOWN)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4_000_000  # bytes, for 8 MB that were read


@pytest.mark.parametrize("code", ["", " [input.model]", " [input]"])
def test_an_error_of_ours_is_read_with_its_reason_and_its_next_command(code):
    error = ERROR.replace(b"gone", f"gone{code}".encode())
    (hit,) = signatures.recognise(events.read([b"x\n" + error + b"INFO more\n"]), KNOWN)[0]
    assert (hit.signature.id, hit.line.number) == ("own-error", 2)
    assert hit.groups == {"told": "the model is gone", "why": "first line; second line", "next": "./inv pull x"}


@pytest.mark.parametrize(
    "text", ["✗ software-fp4: x.cubin\n✗ trap-stub: y\n", "✗ half\n  why:  cut off here", "FAIL x\nINFO y\n"]
)
def test_text_that_only_resembles_our_errors_is_ignored(text):
    assert shown(text) == []


BY_ID = {signature.id: signature for signature in KNOWN}


def test_commands_of_ours_that_a_fix_names_are_there():
    names = {*namespace.task_names, *namespace.collections}
    for signature in KNOWN:
        for command in re.findall(r"\./inv ([a-z][\w.-]*)", signature.fix):
            assert command in names, f"{signature.id}: ./inv {command}"


def test_compiler_errors_are_also_in_the_builders_table():
    """sparkforge/compile/diagnosis.toml explains failed builds; `serve` must not read it, so both tables must agree."""
    for name, text in (
        ("fp4-without-suffix", "Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'"),
        ("fp4-suffix-mismatch", "PTX with .target 'sm_121a' cannot be compiled for architecture 'sm_121'"),
    ):
        error = ProcessError("nvcc ended with code 255", text, "run it by hand", code="process.failed")
        assert ninja.explained(error) is not error
        assert BY_ID[name].line.search(text)


def test_a_condition_holds_only_for_a_known_fact_of_its_type():
    for condition, holds, fails in (
        ({"is": True}, True, 1),
        ({"is": False}, False, None),
        ({"at_least": 1}, 1, True),
        ({"below": 2}, 1.5, 2),
        ({"below": 2}, 1, "1"),
    ):
        assert [FactCondition.model_validate(condition).holds(value) for value in (holds, fails)] == [True, False]


GOOD = """[[signature]]
id = "a"
kind = "CUDA"
severity = "fatal"
line = "x"
what = "w"
why = "y"
fix = "f"
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("", 'colour = "red"'), "signature.0.colour: Extra inputs are not permitted"),
        (('line = "x"', 'line = "("'), "signature.0.line: Input should be a valid regular expression"),
        ((GOOD, "[[signature]"), "it is not TOML"),
    ],
)
def test_a_malformed_table_is_refused_by_name(tmp_path, change, message):
    old, new = change
    table = tmp_path / "signatures.toml"
    table.write_text(GOOD.replace(old, new) if old else f"{GOOD}{new}\n")
    with pytest.raises(InputError, match=re.escape(message), check=lambda error: error.code == "input.table"):
        signatures.load(table)


def test_every_row_can_be_used():
    """Each row's condition excludes some lines, its texts use existing groups, and its causes are rows of the table."""
    names = [signature.id for signature in signatures.load()]
    assert len(set(names)) == len(names)
    for signature in signatures.load():
        assert signature.reads_logs or signature.facts, signature.id
        assert not (signature.line and signature.line.search("")), signature.id
        bounds = [(fact.equal, fact.at_least, fact.below) for fact in signature.facts.values()]
        assert (None, None, None) not in bounds, signature.id
        groups = {*(signature.line.groupindex if signature.line else ()), *signatures.BUILTIN_GROUPS}
        groups |= {"why", "next"} if signature.block else set()
        assert {*re.findall(r"\{(\w*)\}", signature.what + signature.why + signature.fix)} <= groups, signature.id
        known = {*names, signatures.EVERY, signatures.AUDIT, signatures.ENGINE, signatures.LAST}
        assert {*signature.follows} <= known, signature.id
