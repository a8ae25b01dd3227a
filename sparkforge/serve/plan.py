"""StartPlan: one start, described once, from a command's options, a recorded start, or cluster.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkforge.core.errors import UsageError
from sparkforge.core.vllm_flags import passable

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class StartPlan:
    """The plan of a start: model, device, address and access. Every device takes it whole.

    `model` is a folder, empty for the device's default, and `model_id` its name in the API, empty for the folder's
    name. An empty `profile` or `stack` is the device's default. `host` is an IP address, empty for loopback. `key_file`
    has the API key that clients must send, `hosts` further names for the Host header. `flags` are vLLM's own and win
    over the profile's. `variables` are the environment, with --context as MAX_MODEL_LEN. `image` is the id of a
    container's image, empty for the one that Compose names. `python` is the interpreter of an environment that the user
    made. A `profiled` server can be asked for traces. With `tiny_first` a GPU serves the tiny model before a larger
    one, and its answers must be the recorded ones. A `trial` ends with this process, unless it is a
    container, and is never recorded as known good.
    """

    device: str
    model: str = ""
    model_id: str = ""
    profile: str = ""
    stack: str = ""
    port: int = 8000
    host: str = ""
    key_file: str | None = None
    key: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    python: str = ""
    profiled: bool = False
    trial: bool = False
    tiny_first: bool = False

    @property
    def address(self) -> str:
        """The IP address to listen on."""
        return self.host or LOOPBACK


def checked_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return vLLM's flags of a configuration file. Raises ValueError for one that `./inv up` does not take either."""
    try:
        return passable(flags, relative_to=None)
    except UsageError as error:
        raise ValueError(f"{error.what}: {error.why}") from None
