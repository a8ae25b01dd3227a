"""The wheel, installed without an index into a separate environment, as a user without a clone runs it."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from programs import require

from sparkforge.core import launcher
from sparkforge.core.paths import ROOT, WHEEL_LIST

pytestmark = pytest.mark.slow


def tracked():
    options = ("-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    command = [require("git"), *options]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if not name.startswith(("tests/", "docs/", "lab/")):
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
            (folder / "copy" / name).chmod((ROOT / name).stat().st_mode)
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--offline", "--no-build-isolation"]
    command += ["--python", sys.executable, "--out-dir", folder / "dist", folder / "copy"]
    subprocess.run(command, check=True, timeout=120)
    [path] = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="session")
def sparkforge(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    venv, home = folder / "venv", folder / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    # The wheel's requirements come from the environment of the tests, which has the versions of the same lock.
    site = Path(sysconfig.get_path("purelib", vars={"base": venv, "platbase": venv}))
    (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    install = [*pip, "install", "--quiet", "--no-index", "--find-links", wheel.parent, "--no-deps"]
    subprocess.run([*install, "--ignore-installed", "sparkforge"], check=True, timeout=120)
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False, timeout=120)
    assert "sparkforge " not in checked.stdout  # the environment of all tests has overridden versions of other packages

    def run(*arguments, **more):
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **more}
        command = [venv / "bin" / "sparkforge", *arguments]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600)

    run.home, run.folder = home, folder
    return run


def test_the_wheel_carries_files_of_the_checkout_and_no_others(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix("sparkforge/checkout/") for name in archive.namelist() if "/checkout/" in name}
    assert names - {WHEEL_LIST} <= tracked()
    assert {"pins.toml", "locks/tools.txt", "sparkforge/models/tiny.safetensors", "deploy/start", "inv"} <= names


def test_its_command_uses_its_own_name_and_the_folders_of_xdg(sparkforge):
    listed = sparkforge("--list")
    assert listed.returncode == 0, listed.stderr
    assert "sparkforge COMMAND --help shows options" in listed.stdout
    assert "./inv" not in listed.stdout + sparkforge("up", "--help").stdout
    for variables, state in (({}, sparkforge.home / ".local/state"), ({"XDG_STATE_HOME": "/elsewhere"}, "/elsewhere")):
        doctor = sparkforge("doctor", **variables)
        assert doctor.returncode == 0
        assert f"not read: {state}/sparkforge/validation.json" in doctor.stderr
    assert "serve: sparkforge up gpt-oss-20b" in sparkforge("plan", "gpt-oss-20b").stderr
    assert "next: sparkforge up" in sparkforge("status").stderr
    assert "sparkforge test is for a clone" in sparkforge("test").stderr
    (sparkforge.folder / "empty-model").mkdir()
    error = sparkforge("up", "--device", "embedded", "--model", "empty-model").stderr
    assert f"no model in {sparkforge.folder / 'empty-model'}" in error  # from the caller's folder
    folders = {path.relative_to(sparkforge.home).as_posix() for path in sparkforge.home.glob(".*/*")}
    assert folders <= {".local/share", ".local/state", ".cache/sparkforge"}


@pytest.mark.nightly
def test_it_serves_an_answer_where_there_is_no_clone(sparkforge, free_port):
    allowed = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and name != "PIP_INDEX_URL"}
    try:
        up = sparkforge("up", "--device", "embedded", "--port", str(free_port()), **allowed)
        assert up.returncode == 0, up.stderr
        assert "stop: sparkforge down" in up.stderr
        assert sparkforge("chat", "Hello").stdout.strip()
        assert (sparkforge.home / ".local/state/sparkforge/server.json").is_file()
    finally:
        down = sparkforge("down")
    assert "stopped http://" in down.stderr


def test_an_update_replaces_what_the_wheel_carries_and_leaves_what_the_user_put_there(tmp_path):
    root = tmp_path / "root"
    for version, files in enumerate(({"a": "1", "b/gone": "1"}, {"a": "2", "b/new": "2"})):
        carried = tmp_path / str(version)
        for name, text in files.items():
            (carried / name).parent.mkdir(parents=True, exist_ok=True)
            (carried / name).write_text(text)
        (carried / WHEEL_LIST).write_text("".join(f"{text} {name}\n" for name, text in files.items()))
        launcher.lay_out(carried, root)
        (root / "b" / "mine").write_text("mine")
    assert {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} == {
        "a", "b/new", "b/mine", WHEEL_LIST,
    }  # fmt: skip
    assert (root / "a").read_text() == "2"


def test_an_update_that_was_cut_off_is_done_again(tmp_path):
    carried, root = tmp_path / "carried", tmp_path / "root"
    carried.mkdir()
    (carried / WHEEL_LIST).write_text("1 a\n2 missing\n")
    (carried / "a").write_text("1")
    with pytest.raises(FileNotFoundError):
        launcher.lay_out(carried, root)
    (carried / "missing").write_text("2")
    launcher.lay_out(carried, root)
    assert (root / "missing").read_text() == "2"


def test_the_invoke_of_another_environment_is_told_how_the_commands_run(tmp_path):
    for part in Path(sysconfig.get_path("purelib")).glob("invoke*"):
        (tmp_path / part.name).symlink_to(part)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from invoke.main import program; program.run()"
    result = subprocess.run(
        [sys.executable, "-S", "-c", program, "build"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert result.returncode == 41
    assert "Traceback" not in result.stderr
    assert "its Python environment lacks" in result.stderr
    assert "next: ./inv --list" in result.stderr
