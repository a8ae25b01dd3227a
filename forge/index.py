"""Where a package's file lies on the package index that pip is configured to use.

`pypi-simple` reads the index pages (HTML or JSON, PEP 503/691); the index itself is pip's, so that a mirror or a
certificate set up once serves here too.
"""

from __future__ import annotations

import os
import ssl
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import httpx

from sparkforge.errors import CommandError, FetchError
from sparkforge.process import run

# pypi-simple loads an HTML parser and takes 0.14 s: only what reads a page imports it.
if TYPE_CHECKING:
    from pypi_simple import ProjectPage

TIMEOUT = httpx.Timeout(30.0, read=120.0)
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


@dataclass(frozen=True)
class PipConfig:
    """What of pip's configuration matters for a download."""

    index_url: str
    cert: str | None


@cache
def pip_config() -> PipConfig:
    """Return pip's index URL and CA bundle, read from pip itself (environment over files)."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT  # noqa: PLC0415

    try:
        lines = run([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines()
    except CommandError:  # an environment without pip, such as one made by uv
        lines = []
    settings = {}
    for line in sorted(lines, key=lambda text: text.startswith(":env:")):
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip().strip("'\"")
    index = os.environ.get("PIP_INDEX_URL") or settings.get("index-url") or PYPI_SIMPLE_ENDPOINT
    return PipConfig(index.rstrip("/") + "/", os.environ.get("PIP_CERT") or settings.get("cert"))


def client() -> httpx.Client:
    """Return an HTTP client that trusts what pip trusts and follows redirects."""
    cert = pip_config().cert
    verify = ssl.create_default_context(cafile=cert) if cert else True
    return httpx.Client(verify=verify, timeout=TIMEOUT, follow_redirects=True)


def project_page(package: str, http: httpx.Client) -> ProjectPage:
    """Read the index page of `package`. Raises FetchError if it cannot be had."""
    from pypi_simple import ProjectPage  # noqa: PLC0415

    url = f"{pip_config().index_url}{package}/"
    try:
        reply = http.get(url, headers={"Accept": ACCEPT})
        reply.raise_for_status()
    except httpx.HTTPError as error:
        raise FetchError(
            f"cannot find {package}",
            f"the package index did not answer: {error}",
            "check the network, or set PIP_INDEX_URL to your mirror, then run the same command again",
        ) from error
    if "json" in reply.headers.get("content-type", ""):
        return ProjectPage.from_json_data(reply.json(), base_url=str(reply.url))
    return ProjectPage.from_html(package, reply.text, base_url=str(reply.url))


def locate(package: str, filename: str, http: httpx.Client) -> str:
    """Return the URL of `filename`. Raises FetchError if the index does not list it."""
    for entry in project_page(package, http).packages:
        if entry.filename == filename:
            return entry.url.partition("#")[0]
    raise FetchError(
        f"cannot find {filename}",
        f"the package index lists no such file for {package}",
        "check that your mirror is complete, or unset PIP_INDEX_URL",
    )
