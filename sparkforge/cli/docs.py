"""The documentation site: MkDocs runs in an environment made from locks/docs.txt and reads mkdocs.yml and docs/."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.errors import ProcessError
from sparkforge.core.files import locked
from sparkforge.core.process import call, run
from sparkforge.environments import Environment

DOCS = Environment("docs")
ENVIRONMENT = {"PYTHONPATH": "", "NO_MKDOCS_2_WARNING": "1"}
ADDRESS = "127.0.0.1:8001"


def build(*, strict: bool) -> Path:
    """Build the site and return its folder; `strict` makes every warning, such as a broken link, an error.

    The previous site stays if the build fails. Raises ProcessError with MkDocs' last lines, or NetworkError.
    """
    environments.ensure(DOCS, pins.load())
    site = paths.state() / "site"
    new, old = site.with_suffix(".new"), site.with_suffix(".old")
    # Not --quiet, which hides the warnings that --strict counts.
    command: list[str | Path] = [DOCS.python, "-m", "mkdocs", "build", "--site-dir", new]
    with locked(site.with_suffix(".lock"), "build the documentation"):
        run(
            [*command, "--strict"] if strict else command,
            cwd=paths.ROOT,
            env=ENVIRONMENT,
            fix="correct the page that it names",
        )
        shutil.rmtree(old, ignore_errors=True)
        if site.exists():
            site.rename(old)
        new.rename(site)
        shutil.rmtree(old, ignore_errors=True)
    return site


def serve() -> None:
    """Show the site on ADDRESS and build it again when a page changes, until Ctrl-C. Raises ProcessError."""
    environments.ensure(DOCS, pins.load())
    command: list[str | Path] = [DOCS.python, "-m", "mkdocs", "serve", "--dev-addr", ADDRESS]
    if code := call(command, cwd=paths.ROOT, env=ENVIRONMENT):
        raise ProcessError("MkDocs ended", f"exit code {code}", "./inv check --docs --strict", code="process.failed")
