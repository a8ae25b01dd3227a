"""Fetch a pinned wheel that the default package index does not have, such as torch without CUDA, with pip.

In one hash-checked step: from wherever pip is configured to look (a mirror, a find-links folder), else from the index
that pins.toml names for the component.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from sparkforge.core import installers
from sparkforge.core.console import say
from sparkforge.core.errors import NetworkError
from sparkforge.core.files import fsync_directory
from sparkforge.core.process import run_unchecked
from sparkforge.pins import Component
from sparkforge.sources import fetch

PREFIX = ".pip-"  # of the folder that pip downloads into
CHECK = "check the folder or mirror that pip is configured with: pip config list"
MARGIN = 1 << 20  # pip's cache of HTTP answers puts their headers before the body
LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module("pip", run_name="__main__")
"""


def fetch_wheel(component: Component, filename: str) -> Path:
    """Download a wheel of `component`, which must fit this Python, into the cache unless it is there.

    Return its path. Raises NetworkError or IntegrityError.
    """
    sha256 = component.files[filename]
    target = fetch.cached(filename, sha256)
    if fetch.intact(target, sha256):
        return target
    with fetch.locked_download(target):
        if fetch.intact(target, sha256):  # another process has fetched it meanwhile
            return target
        for stale in target.parent.glob(f"{PREFIX}*"):  # of a killed run: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=target.parent) as folder:
            _download(component, filename, Path(folder))
            downloaded = Path(folder) / filename
            with downloaded.open("rb+") as file:
                os.fsync(file.fileno())
            downloaded.replace(target)
        fsync_directory(target.parent)
    return target


def _download(component: Component, filename: str, folder: Path) -> None:
    """Have pip download the wheel. The kernel lets it write no file that is larger than the pin says."""
    size = component.size_of(filename) or fetch.LARGEST
    requirement = f"{component.package}=={component.version} --hash=sha256:{component.files[filename]}"
    base = [sys.executable, "-c", LIMITED, str(size + MARGIN), "download", "--no-input", "--progress-bar", "off"]
    base += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", "/dev/stdin"]
    refusals = []
    for index in ([], ["--index-url", str(component.index)]):

        def attempt(index: list[str] = index) -> str:
            process = run_unchecked([*base, *index], stdin=requirement)
            output = process.stdout + process.stderr
            if process.returncode and ("HASHES" in output or "do not match" in output):
                raise fetch.wrong_file(str(component.package), installers.refusal(output).cause, CHECK)
            if process.returncode and "File too large" in output:  # EFBIG
                raise fetch.wrong_file(str(component.package), f"the pin has {size} bytes, and more came", CHECK)
            return (output or f"exit code {process.returncode}") if process.returncode else ""

        refused = installers.insist(attempt, say, str(component.package))
        if refused is None:
            return
        refusals.append(refused)
    causes = dict.fromkeys(refused.cause for refused in refusals)
    raise NetworkError(
        f"cannot fetch {component.package}=={component.version}",
        "; from the index of pins.toml: ".join(causes),
        f"{refusals[0].fix}; or point pip at a folder that holds the wheel: PIP_FIND_LINKS=/folder ./inv up",
        code="network.fetch",
    )
