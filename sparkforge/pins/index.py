"""Find a package's file on the package index that pip is configured to use.

`pypi-simple` reads the index pages (HTML or JSON, PEP 503/691). The index is pip's, so that a mirror or a certificate
that is configured for pip is used here too.
"""

from __future__ import annotations

import os
import ssl
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import tenacity

from sparkforge.core import installers
from sparkforge.core.console import say, without_passwords
from sparkforge.core.errors import NetworkError, StorageError
from sparkforge.core.http import LimitError, request

# pypi-simple loads an HTML parser in 0.14 s, so only functions that read a page import it.
if TYPE_CHECKING:
    from pypi_simple import ProjectPage

PIP_PLACES = ("PIP_CONFIG_FILE", "HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")
TIMEOUT = httpx.Timeout(30.0, read=120.0)
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
PAGE_BYTES = 32 << 20  # the largest page for our locks has 2 MB
PAGE_SECONDS = 300.0
ATTEMPTS = 4
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before another attempt; LONGEST_WAIT also bounds Retry-After
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which the same request may succeed


@dataclass(frozen=True)
class PipConfig:
    """The part of pip's configuration that a download needs."""

    index_url: str
    cert: str | None
    find_links: tuple[Path, ...] = ()  # folders with files; URLs among them are left out


def pip_config() -> PipConfig:
    """Return pip's index URL, CA bundle and folders of files: from the environment, else from pip's files."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT  # noqa: PLC0415

    files = _pip_files(*map(os.environ.get, PIP_PLACES))
    index = os.environ.get("PIP_INDEX_URL") or files.get("index-url") or PYPI_SIMPLE_ENDPOINT
    links = (os.environ.get("PIP_FIND_LINKS") or files.get("find-links", "")).split()
    folders = tuple(Path(link.removeprefix("file://")) for link in links if "://" not in link.removeprefix("file://"))
    return PipConfig(index.rstrip("/") + "/", os.environ.get("PIP_CERT") or files.get("cert"), folders)


@cache
def _pip_files(*_places: str | None) -> dict[str, str]:
    """Return the settings in pip's files, read by pip; `_places`, which determine the files, only key the cache."""
    return installers.pip_files(sys.executable)


def client() -> httpx.Client:
    """Return an HTTP client that trusts pip's certificates and follows redirects.

    Raises StorageError for a CA bundle that cannot be read, NetworkError for a proxy that cannot be used.
    """
    cert = pip_config().cert
    try:
        verify = ssl.create_default_context(cafile=cert) if cert else True
    except OSError as error:  # includes ssl.SSLError; neither names the file
        failure, why = f"cannot read the certificates in {cert}", error.strerror or str(error)
        raise StorageError(failure, why, "pip config list   # correct PIP_CERT", code="storage.access") from error
    try:
        return httpx.Client(verify=verify, timeout=TIMEOUT, follow_redirects=True)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        why = f"{type(error).__name__} for HTTPS_PROXY, HTTP_PROXY or ALL_PROXY"
        fix = "again   # first set it to http://HOST:PORT, or unset it"
        raise NetworkError("cannot use the proxy", why, fix, code="network.fetch") from error


def attempts() -> tenacity.Retrying:
    """Return the retry loop for a request: it repeats after broken connections, timeouts and busy servers."""
    retry, stop = tenacity.retry_if_exception(worth_repeating), tenacity.stop_after_attempt(ATTEMPTS)
    return tenacity.Retrying(stop=stop, retry=retry, wait=_wait, before_sleep=_say_again, reraise=True)


def worth_repeating(error: BaseException) -> bool:
    """Tell whether the same request may succeed later; no after a 404, an endless answer, or a bad URL."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in BUSY
    # ConnectError: unknown host, refused connection, or untrusted certificate.
    lasting = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.ProxyError, httpx.ConnectError, LimitError)
    return isinstance(error, httpx.TransportError) and not isinstance(error, lasting)


def reason(error: httpx.HTTPError) -> str:
    """Return an error as text without the URL, which may hold a password."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code} {error.response.reason_phrase}".strip()
    return f"{type(error).__name__}: {error}"[:500]


def _wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    retry_after = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    usual = tenacity.wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT)(state)
    return min(float(retry_after), LONGEST_WAIT) if retry_after.isdecimal() and len(retry_after) < 10 else usual


def _say_again(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    why = reason(error) if isinstance(error, httpx.HTTPError) else ""
    say(f"the transfer failed ({why}); attempt {state.attempt_number + 1} of {ATTEMPTS}")


def project_page(package: str, http: httpx.Client) -> ProjectPage:
    """Read the index page of `package`. Raises NetworkError if it cannot be read."""
    from pypi_simple import ProjectPage  # noqa: PLC0415

    url = f"{pip_config().index_url}{package}/"
    try:
        page = attempts()(_page, url, http)
    except httpx.HTTPError as error:
        why = f"the package index did not answer: {without_passwords(reason(error))}"
        fix = "again   # first check the network, or set PIP_INDEX_URL to your mirror"
        raise NetworkError(f"cannot find {package}", why, fix, code="network.fetch") from error
    try:
        if "json" in page.headers.get("content-type", ""):
            return ProjectPage.from_json_data(page.json(), base_url=str(page.url))
        return ProjectPage.from_html(package, page.text, base_url=str(page.url))
    except Exception as error:  # errors of pypi-simple, pydantic and Beautiful Soup, and RecursionError
        why = " ".join(str(error).split())[:300]
        why = f"the page of the package index is malformed: {type(error).__name__}: {why}"
        fix = "pip config list   # check that PIP_INDEX_URL names a package index (PEP 503)"
        raise NetworkError(f"cannot find {package}", why, fix, code="network.fetch") from error


def _page(url: str, http: httpx.Client) -> httpx.Response:
    page = request(http, "GET", url, seconds=PAGE_SECONDS, limit=PAGE_BYTES, headers={"Accept": ACCEPT})
    return page.raise_for_status()


def locate(package: str, filename: str, http: httpx.Client) -> tuple[str, int | None]:
    """Return the URL of `filename`, and its size if the index names it. Raises NetworkError if it is not listed."""
    for entry in project_page(package, http).packages:
        if entry.filename == filename:
            return entry.url.partition("#")[0], entry.size
    failure, fix = f"cannot find {filename}", "unset PIP_INDEX_URL   # or check that your mirror is complete"
    raise NetworkError(failure, f"the package index lists no such file for {package}", fix, code="network.fetch")
