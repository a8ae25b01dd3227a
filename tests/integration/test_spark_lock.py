"""The lock of a Spark's tree, fully resolved on another machine: every package has a wheel for aarch64."""

import re
import sys

import pytest

from lab import locks as lab_locks
from sparkforge.core.process import run_unchecked
from sparkforge.pins import locks

pytestmark = pytest.mark.integration


def resolve(text, folder):
    (folder / "lock.txt").write_text(text)
    arguments = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--target", folder / "tree"]
    arguments += lab_locks.load().targets["aarch64"]
    arguments += ["--no-deps", "--require-hashes", "-r", folder / "lock.txt"]
    return run_unchecked(arguments, env=locks.uv_environment())


@pytest.mark.parametrize("stack", ["spark", "spark-next"])
def test_the_whole_aarch64_runtime_resolves(tmp_path, stack):
    text = locks.lock_path(stack).read_text(encoding="utf-8")
    locked = re.findall(r"^[A-Za-z0-9._-]+(?:\[.*\])?==", text, re.MULTILINE)
    output = resolve(text, tmp_path)
    assert output.returncode == 0, output.stderr
    assert len(locked) > 150
    assert f"Would install {len(locked)} packages" in output.stderr
