"""Applying and reversing: all or nothing, twice is once, hand edits are safe, and SIGKILL at every file operation."""

import fcntl
import json
import os
import py_compile
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from forge import patch
from forge.patch import Queue, State
from forge.tree import record_name, store_name
from sparkforge.errors import (
    BusyError,
    PatchConflictError,
    PatchFormatError,
    SparkforgeError,
    TreeModifiedError,
    UsageError,
)
from sparkforge.process import run

RECORD, STORE = record_name("up"), store_name("up")
LINES = "".join(f"line {number}\n" for number in range(12))
UPSTREAM = {
    "pkg/a.py": LINES,
    "pkg/b.py": "value = 1\n",
    "pkg/old/gone.py": "x\n",
    "pkg/other.py": "untouched\n",
    "dist-info/RECORD": "pkg/b.py,sha256=unchanged,10\n",
}
ONCE = {**UPSTREAM, "pkg/a.py": LINES.replace("line 5", "LINE 5"), "pkg/b.py": "value = 2\n"}
TWICE = {
    **ONCE,
    "pkg/a.py": ONCE["pkg/a.py"].replace("line 9", "LINE 9"),
    "pkg/new/n.py": "new\n",
    "pkg/old/gone.py": None,
}
LATER = {**UPSTREAM, "pkg/a.py": LINES.replace("line 5", "later 5"), "pkg/later.py": "later\n"}


@pytest.fixture
def tree(kit, tmp_path):
    return kit.write(tmp_path / "tree", UPSTREAM)


@pytest.fixture
def queue(kit, tmp_path):
    """Two patches: change two files; then change one of them again, create one, delete one with its directory."""
    first = kit.diff(tmp_path / "d1", UPSTREAM, ONCE)
    second = kit.diff(tmp_path / "d2", ONCE, TWICE)
    return Queue.load(kit.write_queue(tmp_path / "up-1.0", first, second))


@pytest.fixture
def later(kit, tmp_path):
    """Another queue for the same upstream; it leaves b.py and gone.py alone."""
    return Queue.load(kit.write_queue(tmp_path / "later" / "up-1.0", kit.diff(tmp_path / "d3", UPSTREAM, LATER)))


def files(kit, tree):
    """The tree's files without our record and store."""
    return {path: data.decode() for path, data in kit.snapshot(tree).items() if not path.startswith(".sparkforge")}


def expected(contents):
    return {path: text for path, text in contents.items() if text is not None}


def refused(kit, tree, error, action):
    """Run `action`, expect `error`, and prove that the tree is as it was. Returns the error."""
    before = kit.snapshot(tree)
    with pytest.raises(error) as caught:
        action()
    assert kit.snapshot(tree) == before
    return caught.value


def test_apply_records_what_it_did_and_twice_is_once(kit, tree, queue):
    assert patch.inspect(tree, queue).state is State.CLEAN
    assert patch.apply(tree, queue).changed
    assert files(kit, tree) == expected(TWICE)
    record = json.loads((tree / RECORD).read_text())
    assert {key: record[key] for key in ("schema", "upstream", "version", "queue_sha256")} == {
        "schema": 1,
        "upstream": "up",
        "version": "1.0",
        "queue_sha256": queue.sha256,
    }
    assert record["patches"] == [{"name": p.name, "sha256": p.sha256} for p in queue.patches]
    assert sorted(record["files"]) == ["pkg/a.py", "pkg/b.py", "pkg/new/n.py", "pkg/old/gone.py"]
    assert record["files"]["pkg/new/n.py"]["before"] is None
    assert record["files"]["pkg/old/gone.py"]["after"] is None
    snapshot, stamps = kit.snapshot(tree), [path.stat().st_mtime_ns for path in sorted(tree.rglob("*"))]
    assert not patch.apply(tree, queue).changed
    assert patch.inspect(tree, queue).state is State.APPLIED
    assert (kit.snapshot(tree), [p.stat().st_mtime_ns for p in sorted(tree.rglob("*"))]) == (snapshot, stamps)


def test_reverse_is_byte_identical_and_leaves_nothing(kit, tree, queue):
    pristine = kit.snapshot(tree)
    patch.apply(tree, queue)
    assert patch.reverse(tree).changed
    assert kit.snapshot(tree) == pristine
    assert not patch.reverse(tree).changed


def test_a_later_queue_replaces_an_earlier_one_whose_patches_are_gone(kit, tmp_path, tree, queue, later):
    fresh = shutil.copytree(tree, tmp_path / "fresh")
    patch.apply(fresh, later)
    patch.apply(tree, queue)
    shutil.rmtree(tmp_path / "up-1.0")
    assert patch.inspect(tree, later).state is State.OTHER_QUEUE
    assert patch.apply(tree, later).changed
    assert kit.snapshot(tree) == kit.snapshot(fresh)
    patch.reverse(tree)
    assert files(kit, tree) == UPSTREAM


def test_a_conflict_in_the_last_patch_leaves_the_tree_as_it_was(kit, tree, queue):
    (tree / "pkg/old/gone.py").write_text("another text\n")
    error = refused(kit, tree, PatchConflictError, lambda: patch.apply(tree, queue))
    assert "0002-change-something.patch does not apply to pkg/old/gone.py" in error.what


@pytest.mark.parametrize("verb", ["apply", "apply later", "reverse"])
def test_a_tree_edited_by_hand_is_refused_with_the_commands_that_help(kit, tree, queue, later, verb):
    patch.apply(tree, queue)
    (tree / "pkg/b.py").write_text("value = 3\n")
    (tree / "pkg/new/n.py").write_text("mine\n")
    actions = {
        "apply": lambda: patch.apply(tree, queue),
        "apply later": lambda: patch.apply(tree, later),
        "reverse": lambda: patch.reverse(tree),
    }
    error = refused(kit, tree, TreeModifiedError, actions[verb])
    assert "pkg/b.py, pkg/new/n.py" in error.why
    assert patch.inspect(tree, queue).edited == ("pkg/b.py", "pkg/new/n.py")
    run(["sh", "-c", error.fix.partition(", then ")[2]])  # what the message says does put it right
    assert patch.inspect(tree, queue).state is State.PARTIAL
    actions[verb]()
    assert files(kit, tree) == {"apply": expected(TWICE), "apply later": LATER, "reverse": UPSTREAM}[verb]


@pytest.mark.parametrize("put_back", [["pkg/b.py"], ["pkg/a.py", "pkg/b.py", "pkg/old/gone.py"]])
def test_files_put_back_to_upstream_are_patched_again(kit, tree, queue, put_back):
    patch.apply(tree, queue)
    kit.write(tree, {path: UPSTREAM[path] for path in put_back})
    assert patch.inspect(tree, queue).state is State.PARTIAL
    assert patch.apply(tree, queue).changed
    assert files(kit, tree) == expected(TWICE)


def test_a_package_installed_anew_over_its_record_needs_no_store(kit, tree, queue):
    patch.apply(tree, queue)
    shutil.rmtree(tree / STORE)
    shutil.rmtree(tree / "pkg")
    kit.write(tree, UPSTREAM)
    patch.apply(tree, queue)
    assert files(kit, tree) == expected(TWICE)


def test_two_upstreams_live_in_one_tree_and_come_off_alone_or_together(kit, tmp_path, tree, queue):
    pristine = kit.snapshot(tree)
    other = Queue.load(kit.write_queue(tmp_path / "other-2.0", kit.diff(tmp_path / "d4", {}, {"lib/o.py": "o\n"})))
    patch.apply(tree, queue)
    alone = kit.snapshot(tree)
    patch.apply(tree, other)
    assert [patch.inspect(tree, each).state for each in (queue, other)] == [State.APPLIED] * 2
    assert files(kit, tree) == expected({**TWICE, "lib/o.py": "o\n"})
    assert patch.reverse(tree, "other").files == ("lib/o.py",)
    assert kit.snapshot(tree) == alone
    patch.apply(tree, other)
    assert patch.reverse(tree).patches == tuple(p.name for p in (*other.patches, *queue.patches))
    assert kit.snapshot(tree) == pristine


def test_a_hand_edit_in_one_upstream_keeps_both_from_being_reversed(kit, tmp_path, tree, queue):
    other = Queue.load(kit.write_queue(tmp_path / "other-2.0", kit.diff(tmp_path / "d4", {}, {"lib/o.py": "o\n"})))
    patch.apply(tree, queue)
    patch.apply(tree, other)
    (tree / "pkg/b.py").write_text("mine\n")  # `other` comes first, and must not be gone when this is found
    refused(kit, tree, TreeModifiedError, lambda: patch.reverse(tree))


@pytest.mark.parametrize("state", ["clean", "applied", "later", "interrupted"])
def test_a_dry_run_changes_nothing_and_says_what_would_be(kit, tree, queue, later, quick, state):
    if state in ("applied", "later"):
        patch.apply(tree, queue if state == "applied" else later)
    if state == "interrupted":
        assert kit.killed_before(25, lambda: patch.apply(tree, queue))
    before, stamps = kit.snapshot(tree), [path.stat().st_mtime_ns for path in sorted(tree.rglob("*"))]
    foreseen, back = patch.apply(tree, queue, dry_run=True), patch.reverse(tree, dry_run=True)
    assert (kit.snapshot(tree), [p.stat().st_mtime_ns for p in sorted(tree.rglob("*"))]) == (before, stamps)
    assert foreseen == patch.apply(tree, queue)
    assert foreseen.changed == (state != "applied")
    assert back.changed == (state in ("applied", "later"))


def test_a_dry_run_refuses_what_the_run_would_refuse(kit, tree, queue):
    (tree / "pkg/b.py").write_text("another text\n")
    refused(kit, tree, PatchConflictError, lambda: patch.apply(tree, queue, dry_run=True))
    kit.write(tree, UPSTREAM)
    patch.apply(tree, queue)
    (tree / "pkg/b.py").write_text("mine\n")
    for action in (lambda: patch.apply(tree, queue, dry_run=True), lambda: patch.reverse(tree, dry_run=True)):
        refused(kit, tree, TreeModifiedError, action)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_without_its_stored_originals_a_tree_is_not_touched(kit, tree, queue, damage):
    patch.apply(tree, queue)
    stored = next((tree / STORE).iterdir())
    stored.unlink()
    if damage == "changed":
        stored.write_text("something else\n")
    error = refused(kit, tree, TreeModifiedError, lambda: patch.reverse(tree))
    assert "stored bytes of pkg/" in error.why


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 2}', '{"schema": 1}'])
def test_a_record_that_is_none_of_ours_is_refused(kit, tree, queue, text):
    (tree / RECORD).write_text(text)
    for action in (lambda: patch.apply(tree, queue), lambda: patch.reverse(tree)):
        assert RECORD in refused(kit, tree, TreeModifiedError, action).why


@pytest.mark.parametrize("linked", ["pkg/b.py", "pkg"])
def test_symbolic_links_are_refused(kit, tmp_path, tree, queue, linked):
    outside = tmp_path / "outside"
    (tree / linked).rename(outside)
    (tree / linked).symlink_to(outside)
    before = kit.snapshot(outside) if outside.is_dir() else outside.read_bytes()
    error = refused(kit, tree, PatchFormatError, lambda: patch.apply(tree, queue))
    assert f"{tree / linked} is a symbolic link" in error.why
    assert before == (kit.snapshot(outside) if outside.is_dir() else outside.read_bytes())


def test_a_tree_reached_through_a_link_is_fine(kit, tmp_path, tree, queue):
    (tmp_path / "lib64").symlink_to(tree)
    patch.apply(tmp_path / "lib64", queue)
    assert files(kit, tree) == expected(TWICE)


def test_a_tree_that_may_not_be_written_is_refused(kit, tree, queue, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    for action in (lambda: patch.apply(tree, queue), lambda: patch.reverse(tree)):
        assert "may not write" in refused(kit, tree, UsageError, action).why


def test_no_tree_is_a_usage_error(tmp_path, queue):
    with pytest.raises(UsageError, match="no directory"):
        patch.apply(tmp_path / "nowhere", queue)


def test_hard_links_into_a_cache_keep_their_bytes_and_modes_stay(kit, tmp_path, tree, queue):
    (tree / "pkg/b.py").chmod(0o755)
    (tree / "pkg/old/gone.py").chmod(0o640)
    cache = shutil.copytree(tree, tmp_path / "cache", copy_function=os.link)
    patch.apply(tree, queue)
    assert files(kit, cache) == UPSTREAM
    assert (tree / "pkg/b.py").stat().st_mode & 0o777 == 0o755
    patch.reverse(tree)
    assert [(tree / path).stat().st_mode & 0o777 for path in ("pkg/b.py", "pkg/old/gone.py")] == [0o755, 0o640]


@pytest.mark.parametrize("verb", ["apply", "reverse"])
def test_stale_bytecode_is_never_run(tree, queue, verb):
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if verb == "reverse":
        patch.apply(tree, queue)
    for name in ("b", "other"):
        (tree / "pkg/other.py").write_text("")
        py_compile.compile(str(tree / f"pkg/{name}.py"), invalidation_mode=unchecked)
    if verb == "apply":
        patch.apply(tree, queue)
    else:
        patch.reverse(tree)
    done = run([sys.executable, "-B", "-c", "import pkg.b; print(pkg.b.value)"], env={"PYTHONPATH": str(tree)})
    assert done.stdout == {"apply": "2\n", "reverse": "1\n"}[verb]
    assert [path.name.split(".")[0] for path in (tree / "pkg/__pycache__").iterdir()] == ["other"]


def test_two_at_once_are_refused_and_reading_needs_no_lock(kit, tree, queue, later):
    patch.apply(tree, queue)
    handle = os.open(tree, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert not patch.apply(tree, queue).changed
        for action in (lambda: patch.apply(tree, later), lambda: patch.reverse(tree)):
            refused(kit, tree, BusyError, action)
    finally:
        os.close(handle)
    assert patch.apply(tree, later).changed


# --- SIGKILL at every operation that changes a file system ---

# name: (queue in the tree, what is killed, which texts each file may then have, what runs next, texts at the end);
# None stands for no queue, and for reversing
ROADS = {
    "apply, then apply": (None, "queue", (UPSTREAM, TWICE), "queue", TWICE),
    "apply, then reverse": (None, "queue", (UPSTREAM, TWICE), None, UPSTREAM),
    "reverse, then apply": ("queue", None, (UPSTREAM, TWICE), "queue", TWICE),
    "a later queue, then it again": ("queue", "later", (TWICE, LATER), "later", LATER),
    "a later queue, then back": ("queue", "later", (TWICE, LATER), "queue", TWICE),
}


def go(tree, queues, name):
    return patch.reverse(tree) if name is None else patch.apply(tree, queues[name])


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A folder in memory, and no fsync: a killed process loses nothing that the kernel has; only a power cut would."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


@pytest.mark.parametrize("road", ROADS)
def test_killed_before_any_operation_the_next_run_ends_right(kit, quick, tree, queue, later, road):
    begin, killed, whole, following, end = ROADS[road]
    queues = {"queue": queue, "later": later}
    if begin:
        patch.apply(tree, queues[begin])
    reference = shutil.copytree(tree, quick / "reference")
    go(reference, queues, following)
    count = 0
    while True:
        work = shutil.copytree(tree, quick / f"work{count}")
        if not kit.killed_before(count, lambda work=work: go(work, queues, killed)):
            break
        count += 1
        for path in {*whole[0], *whole[1]}:
            text = (work / path).read_text() if (work / path).exists() else None
            assert text in (whole[0].get(path), whole[1].get(path))  # no file is half written
        assert patch.inspect(work, queue).state is not State.MODIFIED
        go(work, queues, following)
        assert files(kit, work) == expected(end)
        assert kit.snapshot(work) == kit.snapshot(reference)  # nothing is left lying about, either
        shutil.rmtree(work)
    assert count > 20


def test_an_edit_after_a_kill_is_not_lost(kit, quick, tree, queue):
    seen = set()
    for number in range(100):
        work = shutil.copytree(tree, quick / f"work{number}")
        if not kit.killed_before(number, lambda work=work: patch.apply(work, queue)):
            break
        (work / "pkg/b.py").write_text("mine\n")
        with pytest.raises(SparkforgeError) as caught:
            patch.apply(work, queue)
        seen.add(type(caught.value))
        assert (work / "pkg/b.py").read_text() == "mine\n"
    assert seen == {PatchConflictError, TreeModifiedError}  # before the journal is written, and after


def test_results_read_well(tree, queue):
    told = [str(patch.apply(tree, queue)) for _ in range(2)]
    assert told == ["2 patches, 4 files changed", "unchanged (2 patches, 4 files)"]
    assert Path(tree / RECORD).read_text().endswith("}\n")
