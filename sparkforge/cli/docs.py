"""The documentation site: MkDocs runs in an environment made from locks/docs.txt and reads mkdocs.yml and docs/."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.files import locked
from sparkforge.core.process import run
from sparkforge.environments import Environment

DOCS = Environment("docs")
ENVIRONMENT = {"PYTHONPATH": "", "NO_MKDOCS_2_WARNING": "1"}


def build() -> Path:
    """Build the site and return its folder; every warning, such as a broken link, is an error.

    The previous site stays if the build fails. Raises ProcessError with MkDocs' last lines, or NetworkError.
    """
    environments.ensure(DOCS, pins.load())
    site = paths.state() / "site"
    new = site.with_suffix(".new")
    command: list[str | Path] = [DOCS.python, "-m", "mkdocs", "build", "--strict", "--site-dir", new]
    with locked(site.with_suffix(".lock"), "build the documentation"):
        run(command, cwd=paths.ROOT, env=ENVIRONMENT, fix="correct the page that it names")
        shutil.rmtree(site, ignore_errors=True)
        new.rename(site)
    return site
