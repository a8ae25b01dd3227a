"""Invalid queues: each fault is refused with its own error before any tree is changed."""

import pytest
from expected import refused

from sparkforge.core.errors import PatchError
from sparkforge.patching.series import Queue

GOOD = """\
diff --git a/pkg/a.py b/pkg/a.py
index 0123456789ab..ba9876543210 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""
NEW = "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"


def load(kit, tmp_path, *diffs, **options):
    return Queue.load(kit.write_queue(tmp_path / "queue-1.0", *diffs, **options))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("pkg/a.py", "../a.py", "points outside the tree"),
        ("pkg/a.py", "/etc/passwd", "points outside the tree"),
        ("pkg/a.py", ".sparkforge-patches.json", "belongs to Sparkforge"),
        ("pkg/a.py", "pkg\\a.py", "not a plain file name"),
        ("a/pkg/a.py", "pkg/a.py", "does not begin with a/"),
        ("+++ b/pkg/a.py", "+++ b/pkg/b.py", "cannot be parsed"),
        ("--- a/pkg/a.py", "--- a/pkg/b.py", "gives one file two names"),
        ("index 0123456789ab..ba9876543210 100644", "old mode 100644\nnew mode 100755", "changes a file's mode"),
        ("index 0123456789ab..ba9876543210 100644", "rename from pkg/a.py\nrename to pkg/a.py", "renames or copies"),
        ("index 0123456789ab..ba9876543210 100644", "similarity index 90%", "belongs to no hunk"),
        ("@@ -1,3 +1,3 @@", "@@ -1,4 +1,4 @@", "cannot be parsed"),
        ("@@ -1,3 +1,3 @@", "@@ one @@", "belongs to no hunk"),
        (" three\n", " three\ntrailing words\n", "belong to no file or hunk"),
        (" three\n", " three\r\n", "carriage returns"),
        ("TWO", "TWO\udcff", "is not UTF-8"),
        (GOOD, "", "is cut off"),
        (GOOD, "\n", "changes no file"),
        (" three\n", " three", "is cut off"),
        (" three\n", " thr\0ee\n", "holds a NUL at byte"),
        ("pkg/a.py", "pkg/\x1b[2Ja.py", "not a plain file name"),
        (" one\n", "\\ No newline at end of file\n one\n", "before the first line"),
        (GOOD, "diff --git a/x a/\ndeleted file mode 100644\nindex e69de29..0000000\n", "two names"),
        (GOOD, GOOD + GOOD, "names a file twice"),
        (GOOD, "diff --git a/x b/x\nindex 12..34 100644\n", "changes nothing in x"),
        (GOOD, "Binary files a/x.so and b/x.so differ\n", "binary change"),
        (GOOD, "diff --git a/x b/x\nindex 12..34 100644\nGIT binary patch\nliteral 1\nA\n", "binary change"),
        (GOOD, NEW.replace("100644", "100755"), "touches a link or a program"),
    ],
)
def test_malformed_diffs_are_refused_by_name(kit, tmp_path, old, new, reason):
    assert old in GOOD
    broken = GOOD.replace(old, new).encode(errors="surrogateescape")
    with refused("patch.format", f"0001-change-something.patch.*{reason}"):
        load(kit, tmp_path, broken)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        *((f"{name}: ", f"X{name}: ", f"lacks the header fields {name}")
          for name in ("Origin", "Bug", "Forwarded", "Last-Update", "Drop-when")),
        ("Description: Change something\n on two lines\n", "Description:\n", "lacks the header fields Description"),
        ("Forwarded: no", "Bug: twice", "repeats one: 'Bug: twice'"),
        ("Forwarded: no", "not a field", "is not a DEP-3 field"),
        ("Description", " Description", "is not a DEP-3 field"),
        ("2026-11-21", "21 November", "is not a date"),
        ("contains pkg", "when merged pkg", "Drop-when that is not"),
        ("contains pkg/a.py nothing of the kind", "lacks pkg/a.py", "Drop-when that is not"),
        ("---\n", "", "no line `---`"),
    ],
)  # fmt: skip
def test_bad_headers_are_refused_by_name(kit, tmp_path, old, new, reason):
    header = kit.HEADER.replace(old, new)
    assert header != kit.HEADER
    diff = GOOD if "---" in header else GOOD[GOOD.index("@@") :]
    with refused("patch.format", reason):
        load(kit, tmp_path, diff, header=header)


@pytest.mark.parametrize(
    ("series", "reason"),
    [
        ("0001-change-something.patch\n", "not in `series`: 0002-change-something.patch"),
        ("0001-change-something.patch\n0002-change-something.patch\n0003-gone.patch\n", "not there: 0003-gone.patch"),
        ("0001-change-something.patch\n../0002-change-something.patch\n", "not there: ../0002"),
        ("0002-change-something.patch\n0001-change-something.patch\n", "not in rising order"),
        ("# nothing\n", "names no patch"),
        (None, "no file `series`"),
    ],
)
def test_a_series_that_differs_from_its_directory_is_refused(kit, tmp_path, series, reason):
    directory = kit.write_queue(tmp_path / "queue-1.0", GOOD, NEW)
    (directory / "series").unlink()
    kit.write(directory, {"series": series})
    with refused("patch.format", reason):
        Queue.load(directory)


def test_a_common_patch_counts_as_one_of_the_folder(kit, tmp_path):
    directory = kit.write_queue(tmp_path / "queue-1.0", GOOD, NEW)
    whole, first = Queue.load(directory), "0001-change-something.patch"
    (tmp_path / "common").mkdir()
    (directory / first).rename(tmp_path / "common" / first)
    (directory / "series").write_text(f"../common/{first}\n0002-change-something.patch\n")
    shared = Queue.load(directory)
    assert shared.sha256 == whole.sha256
    assert [patch.entry for patch in shared.patches] == [f"../common/{first}", "0002-change-something.patch"]
    (directory / "series").write_text(f"0002-change-something.patch\n../common/{first}\n")
    with pytest.raises(PatchError, match="not in rising order"):
        Queue.load(directory)


def test_a_place_outside_the_package_and_another_kind_of_name_are_refused(kit, tmp_path):
    directory = kit.write_queue(tmp_path / "queue-1.0", GOOD)
    for line in ("csrc", "csrc ../out", "csrc /out", "a/b c", "csrc x y", "csrc x//y"):
        kit.write(directory, {"installed": f"# a comment\n{line}\n"})
        with refused("patch.format", "installed"):
            Queue.load(directory)
    (directory / "installed").unlink()
    patch = directory / "0001-change-something.patch"
    for name in ("1-short.patch", "0001-Capital.patch", "0001_underscore.patch", "0001-.patch"):
        patch = patch.rename(directory / name)
        (directory / "series").write_text(name)
        with refused("patch.format", "NNNN-imperative-subject"):
            Queue.load(directory)


def test_the_queue_hash_sees_every_byte_name_and_place(kit, tmp_path):
    variants = [(GOOD, NEW), (NEW, GOOD), (GOOD,), (GOOD.replace("TWO", "Two"), NEW)]
    hashes = {load(kit, tmp_path / str(number), *diffs).sha256 for number, diffs in enumerate(variants)}
    renamed = kit.write_queue(tmp_path / "other" / "queue-1.1", GOOD, NEW)
    assert len(hashes | {Queue.load(renamed).sha256}) == 5


CONTENT = b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("content", "old", "new", "reason"),
    [
        (None, "", "", "the file is missing"),
        (b"zero\n" + CONTENT, "", "", "the text at line 1"),  # right text, one line lower: git would say "offset 1"
        (b"one\r\ntwo\r\nthree\r\n", "", "", "the text at line 1"),
        (CONTENT + b"four\n", "@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n",
         "@@ -1,3 +1,2 @@\n one\n two\n-three\n", "ends without context"),
        (CONTENT, "@@ -1,3 +1,3 @@\n one\n", "@@ -2,2 +2,2 @@\n", None),
        (CONTENT, " three\n", " three\n@@ -1,2 +1,2 @@\n-one\n+ONE\n two\n", "the text at line 1"),  # out of order
    ],
)  # fmt: skip
def test_a_hunk_applies_at_its_line_with_its_text_or_not_at_all(kit, tmp_path, content, old, new, reason):
    (change,) = load(kit, tmp_path, GOOD.replace(old, new) if old else GOOD).patches[0].changes
    if reason is None:
        assert change.apply(content) == b"one\nTWO\nthree\n"
        return
    with refused("patch.conflict", f"0001-change-something.patch does not apply to pkg/a.py · .*{reason}"):
        change.apply(content)


def test_creating_needs_an_absent_file_and_deleting_the_stated_content(kit, tmp_path):
    delete = "diff --git a/n b/n\ndeleted file mode 100644\n--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    (created,) = load(kit, tmp_path / "c", NEW).patches[0].changes
    (deleted,) = load(kit, tmp_path / "d", delete).patches[0].changes
    assert created.apply(None) == b"x\n"
    assert deleted.apply(b"x\n") is None
    wrong = ((created, b"", "is there already"), (deleted, None, "is missing"), (deleted, b"x\ny\n", "ends without"))
    for change, content, reason in wrong:
        with refused("patch.conflict", reason):
            change.apply(content)


@pytest.mark.parametrize(
    ("files", "path", "folder"),
    [({"pkg/a.py": "a\n"}, "pkg", "pkg"), ({"pkg": "a file\n"}, "pkg/new.py", "pkg"),
     ({"pkg/a.py": "a\n"}, "pkg/a.py/new", "pkg/a.py")],
)  # fmt: skip
def test_a_patch_may_not_replace_a_folder_or_write_below_a_file(kit, tmp_path, files, path, folder):
    queue = load(kit, tmp_path / "queue", NEW.replace("a/n", f"a/{path}").replace("b/n", f"b/{path}"))
    tree = kit.write(tmp_path / "tree", files)
    before = kit.snapshot(tree)
    with pytest.raises(PatchError, match=f"cannot be used.*makes a file of {folder}, which is the folder of"):
        queue.apply_to(tree)
    assert kit.snapshot(tree) == before
    with pytest.raises(PatchError):
        queue.apply({path: None}, files)  # as in a wheel


@pytest.mark.parametrize(("text", "contains"), [("nothing of the kind", True), ("something", False), (None, False)])
def test_drop_conditions_are_judged_on_a_file(kit, tmp_path, text, contains):
    content = text and text.encode()
    (condition,) = load(kit, tmp_path, GOOD).patches[0].drop_when
    opposite = load(kit, tmp_path / "o", GOOD, header=kit.HEADER.replace("contains", "lacks")).patches[0].drop_when[0]
    assert (condition.holds_for(content), opposite.holds_for(content)) == (contains, not contains)
