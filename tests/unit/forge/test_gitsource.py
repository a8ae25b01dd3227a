"""Real git: a repository with a submodule is made here, pinned, and brought."""

import subprocess

import pytest

from forge import gitsource
from forge.pins import GitSource
from sparkforge.errors import ArchiveError, FetchError, HashMismatchError, PinError

pytestmark = pytest.mark.needs("git")


def git(folder, *words):
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@e.org", "-c", "init.defaultBranch=main", *words]
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
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    commit(tmp_path / "inner", inner_h="inner\n")
    commit(tmp_path / "up", a_c="int a;\r\n")
    git(tmp_path / "up", "submodule", "--quiet", "add", str(tmp_path / "inner"), "third_party/inner")
    (tmp_path / "up/link.c").symlink_to("a.c")
    return tmp_path / "up", commit(tmp_path / "up")


def pin(repository, commit, **changes):
    values = {
        "of": "c",
        "asked_in": "f",
        "dependency": "d",
        "repository": str(repository),
        "tag": commit,
        "commit": commit,
        "tree": "unknown",
        "licence": "MIT",
        "needed": True,
        "why": "w",
    }
    return GitSource(**{**values, **changes})


def test_a_commit_is_brought_whole_and_once(tmp_path, upstream):
    repository, head = upstream
    commit(repository, a_c="int later;\n")  # the branch moves on; the pin does not
    place = tmp_path / "sources/up/1"
    tree = git(repository, "rev-parse", f"{head}^{{tree}}")
    manifest, made = gitsource.bring("up", pin(repository, head, tree=tree), place)
    assert made
    assert (place / "a.c").read_bytes() == b"int a;\r\n"
    assert (place / "third_party/inner/inner.h").read_text() == "inner\n"
    assert not (place / "link.c").is_symlink()
    assert (place / "link.c").read_bytes() == b"int a;\r\n"
    assert not list(place.rglob(".git"))
    assert (manifest.outputs["commit"], manifest.outputs["tree"]) == (head, tree)
    assert manifest.facts["submodules"] == {"third_party/inner": git(tmp_path / "inner", "rev-parse", "HEAD")}
    repository.rename(tmp_path / "gone")
    assert gitsource.bring("up", pin(repository, head, tree=tree), place) == (manifest, False)


def nothing_left(place):
    return [path.name for path in place.parent.iterdir() if not path.name.endswith(".lock")] == []


def test_another_tree_is_refused_and_nothing_is_kept(tmp_path, upstream):
    place = tmp_path / "sources/up/1"
    with pytest.raises(HashMismatchError, match=r"wanted the tree b{40}"):
        gitsource.bring("up", pin(*upstream, tree="b" * 40), place)
    assert nothing_left(place)


def test_a_commit_or_a_repository_that_is_not_there_is_an_error_with_the_way_by_hand(tmp_path, upstream):
    place = tmp_path / "sources/up/1"
    for missing in (pin(upstream[0], "c" * 40), pin(tmp_path / "nowhere", upstream[1])):
        with pytest.raises(FetchError, match="git init -q up"):
            gitsource.bring("up", missing, place)
        assert nothing_left(place)


def test_the_command_by_hand_does_bring_it(tmp_path, upstream):
    subprocess.run(gitsource.command("up", pin(*upstream), str(tmp_path / "by hand")), shell=True, check=True)  # noqa: S602
    assert (tmp_path / "by hand/third_party/inner/inner.h").is_file()


def test_a_commit_that_is_not_known_is_refused_with_the_command_that_shows_it(tmp_path, upstream):
    with pytest.raises(PinError, match="git ls-remote"):
        gitsource.bring("up", pin(upstream[0], "unknown", tag="v1"), tmp_path / "p")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "nowhere", "."])
def test_a_link_that_leads_out_or_nowhere_is_refused(tmp_path, upstream, target):
    repository, _ = upstream
    (tmp_path / "outside").write_text("secret")
    (repository / "odd").symlink_to(target)
    place = tmp_path / "sources/up/1"
    with pytest.raises(ArchiveError, match="odd"):
        gitsource.bring("up", pin(repository, commit(repository)), place)
    assert nothing_left(place)
