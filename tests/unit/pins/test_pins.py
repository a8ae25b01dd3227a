import re
import shutil
import textwrap
import zipfile

import pytest
from expected import refused

from lab import locks as resolved
from lab.check import unread
from sparkforge import pins
from sparkforge.core.errors import InputError
from sparkforge.core.files import sha256_file
from sparkforge.pins import locks
from sparkforge.pins.index import PipConfig, pip_config
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
GIT = f"""{GOOD}
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


def load(tmp_path, text):
    path = tmp_path / "pins.toml"
    path.write_text(textwrap.dedent(text))
    return pins.load(path)


SECOND = GOOD.partition('summary = "a stack"')[2].replace("components.c]", "components.d]").replace(SHA, "b" * 64)
BROKEN = {
    "no hash": (f'files."c-1-py3-none-any.whl" = {{ sha256 = "{SHA}", size = 7 }}', "", "at least one file"),
    "no size": (", size = 7", "", "files.c-1-py3-none-any.whl.size"),
    "a size that is no number of bytes": ("size = 7", "size = 0", "files.c-1-py3-none-any.whl.size"),
    "unknown key": ('why = "because"', 'why = "because"\nwyh = "typo"', "wyh"),
    "image without digest": ('kind = "wheel"', 'kind = "image"', "digest"),
    "not TOML": ("schema = 1", "schema = ", "not valid TOML"),
    "no such default": ('default = "s"', 'default = "t"', "names no stack: t"),
    "no such stack of a device": ("[stacks.s]", '[devices]\ndocker = "t"\n[stacks.s]', "names no stack: t"),
    "other schema": ("schema = 1", "schema = 2", "schema"),
    "no commit": (f'commit = "{COMMIT}"', "", "commit"),
    "another commit than upstream's": (f'commit = "{COMMIT}"', f'commit = "{SHA[:40]}"', "'commit' is a different one"),
    "a tag's commit from nowhere": (f'tag = "{COMMIT}"', 'tag = "v1"', "'source' must name"),
    "of nothing": ('of = "c"', 'of = "x"', "no component of this stack: g"),
    "one file with two hashes": ("[stacks.s.git.g]", f"{SECOND}\n[stacks.s.git.g]", "two different hashes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_by_name(tmp_path, name):
    old, new, message = BROKEN[name]
    assert old in GIT
    with refused("input.pins", re.escape(message)):
        load(tmp_path, GIT.replace(old, new))


def test_unread_repositories_and_images_are_listed(tmp_path):
    assert unread(load(tmp_path, GIT)) == [f"g {COMMIT[:12]} (tree)"]
    assert unread(load(tmp_path, GIT.replace('tree = "unknown"', f'tree = "{COMMIT}"'))) == []
    image = f"""
[stacks.s.components.base]
version = "1"
kind = "image"
image = "debian"
digest = "sha256:{SHA}"
size = "unknown"
licence = "MIT"
why = "because"
"""
    assert unread(load(tmp_path, GOOD + image)) == ["debian 1 (size: never pulled)"]
    assert unread(load(tmp_path, GOOD + image.replace('"unknown"', "7"))) == []


def test_binary_and_missing_files_are_refused(tmp_path):
    with refused("input.pins", r"pins\.toml has c"):
        load(tmp_path, GOOD).component("s", "x")
    (tmp_path / "pins.toml").write_bytes(b"\xff\xfe")
    with refused("input.pins", "not valid TOML"):
        pins.load(tmp_path / "pins.toml")
    with refused("input.pins", "not there"):
        pins.load(tmp_path / "absent.toml")


def test_a_changed_input_is_seen(tmp_path, monkeypatch):
    copy = tmp_path / "locks"
    shutil.copytree(locks.LOCKS, copy)
    monkeypatch.setattr(resolved, "LOCKS", copy)
    (copy / "embedded.override").write_text("# nothing is left out any more\n")
    assert resolved.drifted() == ["test", "embedded"]


@pytest.mark.parametrize("name", list(resolved.load().sets))
def test_every_requirement_of_a_lock_has_a_hash_and_none_names_an_index(name):
    text = locks.lock_path(name).read_text(encoding="utf-8")
    requirements = re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2])
    lock = resolved.load().sets[name]
    asked = "".join(path.read_text() for path in lock.inputs if path.suffix == ".in").splitlines()
    wanted = {re.split(r"[\[<=>~ ;]", line)[0] for line in asked if line[:1].isalnum()}
    assert wanted
    wanted -= set(lock.omit)
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


@pytest.mark.parametrize("change", ['target = "sparc"', 'constraint = "docs"', 'constraint = "none-of-this-name"'])
def test_a_set_with_an_unknown_target_or_a_later_constraint_is_refused(tmp_path, change):
    table = tmp_path / "sets.toml"
    table.write_text(resolved.TABLE.read_text(encoding="utf-8").replace("[sets.dev]", f"[sets.dev]\n{change}"))
    with pytest.raises(InputError, match="malformed"):
        resolved.load(table)


@pytest.mark.parametrize("text", ["", "schema = 1", "sets = 3", "[sets]\ntest = 3", "[sets.test]\nomit = 3", "[sets"])
def test_a_malformed_table_of_sets_is_a_named_error(tmp_path, text):
    table = tmp_path / "sets.toml"
    table.write_text(f"{text}\n" if "schema" in text or not text else f"schema = 1\ntargets = {{}}\n{text}\n")
    with refused("input.table"):
        resolved.load(table)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_torch_is_pinned_for_every_python_and_machine_we_serve(machine, minor):
    wheel = choose_pinned(pins.load().component("embedded", "torch"), TargetMachine(machine, (3, minor)))
    assert f"cp3{minor}-cp3{minor}" in wheel.filename
    assert machine in wheel.filename
    assert len(wheel.sha256) == 64


def test_a_requirement_of_a_lock_is_replaced_with_its_hashes_and_keeps_its_marker():
    block = "up==1 ; python_version < '3.13' \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n    # via a\n"
    text = "a==1 \\\n    --hash=sha256:0\n" + block
    assert locks.replace(text, {"up": "up==1+ours.1 --hash=sha256:3"}) == (
        "a==1 \\\n    --hash=sha256:0\nup==1+ours.1 ; python_version < '3.13' --hash=sha256:3\n    # via a\n"
    )
    with refused("input.pins", "names it 0 times"):
        locks.replace(text, {"p": "p==1+ours.1 --hash=sha256:3"})


def test_a_lock_without_a_wheel_for_every_machine_is_refused(tmp_path, monkeypatch):
    """A folder replaces the package index."""
    index, lock, hashes = tmp_path / "simple/one", resolved.LockSet(name="one", folder=str(tmp_path)), ""
    index.mkdir(parents=True)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.parent.as_uri())
    for machine in ("x86_64", "aarch64"):
        wheel = index / f"one-1-py3-none-manylinux_2_28_{machine}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("one-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: one\nVersion: 1\n# {machine}\n")
        hashes += f" --hash=sha256:{sha256_file(wheel)}"
        links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in index.glob("*.whl"))
        (index / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
        lock.path.write_text(f"one==1{hashes}\n")
        if machine == "x86_64":
            with refused("input.pins", r"(?s)installed on aarch64 with Python 3\.11 .*no wheels.* one\.in"):
                resolved.require_wheels(lock)
    resolved.require_wheels(lock)


def test_the_environment_overrides_pips_files(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_CERT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("a", "c"):
        (tmp_path / name).write_text(f"[global]\nindex-url = http://{name}.test/simple/\ncert = /{name}.pem\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "a"))
    assert pip_config() == PipConfig("http://a.test/simple/", "/a.pem")
    monkeypatch.setenv("PIP_INDEX_URL", "http://b.test")
    assert pip_config() == PipConfig("http://b.test/", "/a.pem")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "c"))
    monkeypatch.delenv("PIP_INDEX_URL")
    assert pip_config() == PipConfig("http://c.test/simple/", "/c.pem")
