"""Real git: make a repository with a submodule, pin it, and fetch it."""

import subprocess

import pytest
from expected import refused

from sparkforge.pins import GitSource
from sparkforge.sources import trees

pytestmark = pytest.mark.needs("git")


def git(folder, *arguments):
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@e.org", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder, **files):
    if not (folder / ".git").exists():
        folder.mkdir()
        git(folder, "init", "-q")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")  # for git in these tests
    monkeypatch.setattr(trees, "SETTINGS", (*trees.SETTINGS, "protocol.file.allow=always"))
    commit(tmp_path / "inner", inner_h="inner\n")
    commit(tmp_path / "up", a_c="int a;\r\n")
    git(tmp_path / "up", "submodule", "--quiet", "add", str(tmp_path / "inner"), "third_party/inner")
    (tmp_path / "up/link.c").symlink_to("a.c")
    return tmp_path / "up", commit(tmp_path / "up")


def pin(repository, commit, **changes):
    values = {
        "of": "c", "asked_in": "f", "dependency": "d", "repository": str(repository), "tag": commit, "commit": commit,
        "tree": "unknown", "size": "unknown", "licence": "MIT", "needed": True, "why": "w",
    }  # fmt: skip
    return GitSource(**{**values, **changes})


def test_a_commit_is_fetched_completely_and_once(tmp_path, upstream):
    repository, head = upstream
    commit(repository, a_c="int later;\n")  # the branch moves on; the pin does not
    path = tmp_path / "sources/up/1"
    tree = git(repository, "rev-parse", f"{head}^{{tree}}")
    manifest, is_new = trees.clone("up", pin(repository, head, tree=tree), path)
    assert is_new
    assert (path / "a.c").read_bytes() == b"int a;\r\n"
    assert (path / "third_party/inner/inner.h").read_text() == "inner\n"
    assert not (path / "link.c").is_symlink()
    assert (path / "link.c").read_bytes() == b"int a;\r\n"
    assert not list(path.rglob(".git"))
    assert (manifest.outputs["commit"], manifest.outputs["tree"]) == (head, tree)
    assert manifest.facts["submodules"] == {"third_party/inner": git(tmp_path / "inner", "rev-parse", "HEAD")}
    repository.rename(tmp_path / "gone")
    assert trees.clone("up", pin(repository, head, tree=tree), path) == (manifest, False)


def nothing_left(folder):
    return [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == []


def test_another_tree_and_what_is_not_there_or_not_known_are_refused_with_the_next_command(tmp_path, upstream):
    path = tmp_path / "sources/up/1"
    for wrong, code, message in (
        (pin(*upstream, tree="b" * 40), "integrity.hash", r"wanted the tree b{40}"),
        (pin(upstream[0], "c" * 40), "network.fetch", "git init -q up"),
        (pin(tmp_path / "nowhere", upstream[1]), "network.fetch", "git init -q up"),
        (pin(upstream[0], "unknown", tag="v1"), "input.pins", "git ls-remote"),
    ):
        with refused(code, message):
            trees.clone("up", wrong, path)
        assert not path.parent.exists() or nothing_left(path)


def test_links_to_outside_or_to_no_file_are_refused(tmp_path, upstream):
    repository, _ = upstream
    (tmp_path / "outside").write_text("secret")
    path = tmp_path / "sources/up/1"
    for target in ("/etc/passwd", "../../outside", "nowhere"):
        (repository / "odd").unlink(missing_ok=True)
        (repository / "odd").symlink_to(target)
        with refused("integrity.archive", "odd"):
            trees.clone("up", pin(repository, commit(repository)), path)
        assert nothing_left(path)


def test_neither_a_hooks_environment_nor_a_smudge_filter_reaches_a_checkout(tmp_path, upstream, monkeypatch):
    repository, _ = upstream
    (repository / ".gitattributes").write_text("*.c filter=evil\n")
    head = commit(repository)
    before = {path: path.read_bytes() for path in (tmp_path / "inner").rglob("*") if path.is_file()}
    (tmp_path / ".gitconfig").write_text('[filter "evil"]\n\tsmudge = sed s/int/evil/\n\trequired = true\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "inner/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "inner/.git/index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "inner"))
    clone = tmp_path / "sources/up/1"
    trees.clone("up", pin(repository, head), clone)
    assert (clone / "a.c").read_bytes() == b"int a;\r\n"
    assert {path: path.read_bytes() for path in (tmp_path / "inner").rglob("*") if path.is_file()} == before
