"""The Hugging Face hub as the source of a checkpoint, by its own library (huggingface_hub 2.4).

Transfers use the library's `http_get`, which can resume a file at any byte; its higher-level calls restart an
interrupted file, and a shard of gpt-oss-120b has 4 GB.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub import errors as hub_errors
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from sparkforge.core.errors import IntegrityError, NetworkError, SparkforgeError, StorageError
from sparkforge.core.files import disk_full
from sparkforge.models.hub_source import RemoteFile

COMMIT = re.compile(r"[0-9a-f]{40}")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised for a malformed answer
RETRY_FIX = "again   # continues where it stopped"
ELSEWHERE = "again   # first check the network and HF_ENDPOINT, or name a copy from another machine with --mirror"


class Hub:
    """A repository of the hub, or of the one in HF_ENDPOINT, at one commit."""

    def __init__(self, repository: str, revision: str) -> None:
        self.repository, self.name = repository, repository
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE") == "1":
            fix = "unset HF_HUB_OFFLINE   # or name a folder with --mirror"
            raise NetworkError(f"cannot fetch {repository}", "HF_HUB_OFFLINE is set", fix, code="network.fetch")
        with _hub_errors(repository, revision):
            info = HfApi(endpoint=self.endpoint).model_info(repository, revision=revision, files_metadata=True)
            if not COMMIT.fullmatch(str(info.sha)):
                raise ValueError(f"the hub names no commit: {str(info.sha)[:80]!r}")
            self.revision = str(info.sha)
            self._files = []
            for entry in info.siblings or []:  # large files carry a sha256, small ones their git blob's id
                lfs = entry.lfs
                digest = f"sha256:{lfs.sha256}" if lfs else f"git:{entry.blob_id}" if entry.blob_id else ""
                size = int(lfs.size if lfs else entry.size or 0)
                self._files.append(RemoteFile(str(entry.rfilename), size, digest))

    def files(self) -> list[RemoteFile]:
        """Return every file of the commit with its digest in the hub's metadata."""
        return self._files

    def fetch(self, file: RemoteFile, part: Path, advance: Callable[[int], None]) -> None:
        """Download the bytes that `part` lacks. Raises NetworkError or StorageError."""
        url = hf_hub_url(self.repository, file.name, revision=self.revision, endpoint=self.endpoint)
        with _hub_errors(self.repository, self.revision), part.open("ab") as output:
            begin = output.tell()
            if begin > file.size:
                output.truncate(0)
                begin = 0
            headers, progress = build_hf_headers(library_name="sparkforge"), _progress(file, begin, advance)
            sizes: dict[str, Any] = {"resume_size": begin, "expected_size": file.size}
            http_get(url, output, headers=headers, tqdm_class=progress, **sizes)


def _progress(file: RemoteFile, begin: int, advance: Callable[[int], None]) -> Any:
    """Return a class with the few methods of tqdm that the library calls.

    It calls `advance` with the number of new bytes, and raises IntegrityError if the file has more
    bytes than in the hub's metadata.
    """
    count = begin

    class DownloadProgress:
        """Replaces tqdm: takes its arguments and shows nothing."""

        def __init__(self, *_args: object, **_more: object) -> None:
            pass

        def update(self, size: float | None = 1) -> None:
            nonlocal count
            count += int(size or 0)
            if count > file.size:
                failure = f"{file.name} is not the file that the hub names"
                fix = "again   # first check HF_ENDPOINT, or name a copy with --mirror"
                raise IntegrityError(failure, f"it has more than {file.size} bytes", fix, code="integrity.hash")
            advance(int(size or 0))

        def close(self) -> None:
            """Do nothing, because nothing is open."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return DownloadProgress


@contextmanager
def _hub_errors(repository: str, revision: str) -> Iterator[None]:
    try:
        yield
    except InterruptedError:
        raise
    except (*MALFORMED, hub_errors.HfHubHTTPError, hub_errors.HFValidationError, OSError) as error:
        raise _as_ours(error, repository, revision) from error
    except Exception as error:
        # httpx2's own errors; the library re-exports no name for their base.
        if type(error).__module__.partition(".")[0] not in {"httpx2", "httpx"}:
            raise
        failure = f"cannot reach the hub for {repository}"
        raise NetworkError(failure, _text(error), ELSEWHERE, code="network.fetch") from error


def _as_ours(error: Exception, repository: str, revision: str) -> SparkforgeError:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full(Path.cwd() if error.filename is None else Path(error.filename).parent)
    if isinstance(error, OSError) and error.filename:
        fix = "without --to   # or name another folder"
        return StorageError(f"cannot write {error.filename}", str(error.strerror), fix, code="storage.access")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    page = f"{constants.ENDPOINT}/{repository}"
    why, fix = f"the hub answered {status}: {_text(error)}" if status else _text(error), RETRY_FIX
    if isinstance(error, hub_errors.RevisionNotFoundError):
        why, fix = f"it has no revision {revision}", f"--revision main   # or look at {page}/commits/main"
    elif isinstance(error, hub_errors.GatedRepoError) or status in {401, 403}:
        if status:
            why = f"the hub answered {status}: it is gated or private, or there is no such name"
        fix = f"again   # first accept its terms at {page}, and set HF_TOKEN"
    elif isinstance(error, hub_errors.RepositoryNotFoundError | hub_errors.HFValidationError):
        why, fix = "the hub has no such repository", "./inv pull openai/gpt-oss-120b"
    return NetworkError(f"cannot fetch {repository}", why, fix, code="network.fetch")


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
