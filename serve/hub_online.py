"""The Hugging Face hub as the source of a checkpoint, by its own library (huggingface_hub 2.4).

Transfers go through the library's `http_get`, which takes up a file at any byte; its higher-level calls begin an
interrupted file anew, and a shard of gpt-oss-120b has 4 GB.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub import errors as hub_errors
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from serve.hub import Wanted
from sparkforge.errors import FetchError, SparkforgeError, StorageError
from sparkforge.files import disk_full

AGAIN = "run the same command again: it goes on where it stopped"
ELSEWHERE = "check the network and HF_ENDPOINT; or fetch it on another machine and name the copy: --mirror FOLDER"


class Hub:
    """A repository of the hub, or of what HF_ENDPOINT names, at one commit."""

    def __init__(self, repository: str, revision: str) -> None:
        """Ask for the commit and its files. Raises FetchError."""
        self.repository, self.name = repository, repository
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE") == "1":
            raise FetchError(
                f"cannot fetch {repository}", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or --mirror FOLDER"
            )
        with named(repository, revision):
            found = HfApi(endpoint=self.endpoint).model_info(repository, revision=revision, files_metadata=True)
        self.revision = str(found.sha)
        self._files = [_wanted(sibling) for sibling in found.siblings or []]

    def files(self) -> list[Wanted]:
        """Return every file of the commit with the digest that the hub's metadata names."""
        return self._files

    def bring(self, wanted: Wanted, part: Path, advance: Callable[[int], None]) -> None:
        """Download what `part` lacks. Raises FetchError or DiskFullError."""
        url = hf_hub_url(self.repository, wanted.name, revision=self.revision, endpoint=self.endpoint)
        with named(self.repository, self.revision), part.open("ab") as file:
            here = file.tell()
            if here > wanted.size:
                file.truncate(0)
                here = 0
            http_get(
                url,
                file,
                resume_size=here,
                headers=build_hf_headers(library_name="sparkforge"),
                expected_size=wanted.size,
                tqdm_class=_progress(advance),
            )


def _wanted(sibling: Any) -> Wanted:
    """Return the file of one entry of the hub's answer: large ones carry a sha256, small ones their git blob's id."""
    lfs = sibling.lfs
    digest = f"sha256:{lfs.sha256}" if lfs else f"git:{sibling.blob_id}" if sibling.blob_id else ""
    return Wanted(str(sibling.rfilename), int(lfs.size if lfs else sibling.size or 0), digest)


def _progress(advance: Callable[[int], None]) -> Any:
    """Return a class with the few methods of tqdm that the library calls."""

    class Progress:
        """Stands in for tqdm: takes its arguments, shows nothing, passes the bytes on."""

        def __init__(self, *_args: object, **_more: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            """Pass on `count` bytes; the signature is tqdm's."""
            advance(int(count or 0))

        def close(self) -> None:
            """Nothing is open."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Progress


@contextmanager
def named(repository: str, revision: str) -> Iterator[None]:
    """Turn what the library raises inside into our errors."""
    try:
        yield
    except InterruptedError:
        raise
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, OSError, ValueError) as error:
        raise _told(error, repository, revision) from error
    except Exception as error:
        # httpx2's own errors; the library re-exports no name for their base.
        if type(error).__module__.partition(".")[0] not in {"httpx2", "httpx"}:
            raise
        raise FetchError(f"cannot reach the hub for {repository}", _words(error), ELSEWHERE) from error


def _told(error: Exception, repository: str, revision: str) -> SparkforgeError:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full(Path.cwd() if error.filename is None else Path(error.filename).parent)
    if isinstance(error, OSError) and error.filename:
        return StorageError(f"cannot write {error.filename}", str(error.strerror), "name another folder: --to FOLDER")
    return _by_hub(error, repository, revision)


def _by_hub(error: Exception, repository: str, revision: str) -> FetchError:
    what, status = f"cannot fetch {repository}", getattr(getattr(error, "response", None), "status_code", 0)
    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return FetchError(what, f"it has no revision {revision}", f"--revision main, or look at {page}/commits/main")
    if isinstance(error, hub_errors.GatedRepoError) or status in {401, 403}:
        why = (
            f"the hub answered {status}: it is gated or private, or there is no such name" if status else _words(error)
        )
        return FetchError(what, why, f"accept its terms at {page}, then HF_TOKEN=hf_… ./inv model.fetch {repository}")
    if isinstance(error, hub_errors.RepositoryNotFoundError | hub_errors.HFValidationError):
        return FetchError(what, "the hub knows no such repository", "./inv model.fetch openai/gpt-oss-120b")
    if status:
        return FetchError(what, f"the hub answered {status}: {_words(error)}", AGAIN)
    return FetchError(what, _words(error), AGAIN)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
