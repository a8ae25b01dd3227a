"""Access to the server: the file with the API key, and the middleware with which vLLM guards every route.

vLLM 0.32.0's own key guards /v1, /v2, /inference and /cohere only: `POST /invocations` answers a whole chat without
it (vllm/entrypoints/serve/middleware/authenticate.py). vLLM's documented option for middleware loads `Guard`:
`--middleware sparkforge.serve.access.Guard`. It reads environment variables, since everybody can read arguments:

    VLLM_API_KEY              the key; vLLM's own check reads it here too
    SPARKFORGE_API_KEY_FILE   the key's file; if it is set without a key, the server does not start
    SPARKFORGE_ALLOWED_HOSTS  comma-separated names for the Host header: NAME (any port) or NAME:PORT; empty: all
    SPARKFORGE_METRICS        `open`: /metrics answers without the key
    SPARKFORGE_LIMITS         bounds of a request (sparkforge.serve.limits), checked after the key
    FORWARDED_ALLOW_IPS       addresses of proxies whose X-Forwarded-For uvicorn believes

Nothing but the standard library is imported: vLLM's process and the container's health check load this module.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sparkforge.core.errors import StorageError, UsageError, on
from sparkforge.core.files import existing_part
from sparkforge.core.paths import typed
from sparkforge.core.vllm_flags import KEY_FIX, meant
from sparkforge.serve import limits
from sparkforge.serve.limits import Application, Receive, RequestError, Scope, Send

KEY, KEY_FILE, HOSTS = "VLLM_API_KEY", "SPARKFORGE_API_KEY_FILE", "SPARKFORGE_ALLOWED_HOSTS"
METRICS, BIND = "SPARKFORGE_METRICS", "SPARKFORGE_BIND"
# uvicorn's default believes 127.0.0.1 and [::1]: a client of this machine could pass as many, and take all slots.
PROXIES = "FORWARDED_ALLOW_IPS"
OPEN = "open"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SECRET = "/run/secrets/api_key"  # noqa: S105 - where Compose puts the key's file
LONGEST_KEY = 4096
KEY_TEXT = re.compile(r"[\x21-\x7e]+")  # the characters that an Authorization header takes unquoted
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:\[\],/@]+)(?::([0-9]{1,5}))?")
# Scaling of a cluster's engines. One machine does not need it, and one POST makes vLLM answer 503 to everybody.
CLOSED_PATHS = frozenset({"/scale_elastic_ep", "/is_scaling_elastic_ep"})


class Guard:
    """ASGI middleware: a request passes with an allowed Host header and, if there is a key, with the key.

    /health needs no key, nor does /metrics with SPARKFORGE_METRICS=open. Raises RuntimeError at the server's start for
    invalid settings, so no server runs without a guard.
    """

    def __init__(self, app: Application) -> None:
        key, metrics = os.environ.get(KEY, ""), os.environ.get(METRICS, "")
        if os.environ.get(KEY_FILE) and not key:
            raise RuntimeError(f"{KEY_FILE} names a file, but the key in it did not arrive in {KEY}")
        if metrics not in {"", OPEN}:
            raise RuntimeError(f"{METRICS} is {metrics!r}; it must be {OPEN} or empty")
        self._app = limits.Limiter(app, os.environ)
        self._digest = hashlib.sha256(key.encode()).digest() if key else b""
        self._hosts = frozenset(hosts(os.environ.get(HOSTS, "")))
        self._open_paths = {"/health", "/metrics"} if metrics == OPEN else {"/health"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if b"x-api-key" in headers and b"authorization" not in headers:  # as Anthropic's clients send it (vLLM 51572)
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + headers[b"x-api-key"])]}
        refusal = self._refusal(scope)
        if not refusal:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)})  # before accept: HTTP 403
        else:
            await refusal.answer(scope, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        # A page of a foreign site can make its own name point to 127.0.0.1 (DNS rebinding); its requests have that name
        # as Host.
        named = [value for name, value in headers if name == b"host"]
        host = HOST.fullmatch(named[0].decode("latin-1").lower()) if len(named) == 1 else None
        if self._hosts and not (host and self._hosts & {host[0], host[1], "*"}):
            return RequestError(f"this Host header is not allowed; {HOSTS} names the hosts that are", status=403)
        if path in CLOSED_PATHS:
            return RequestError("Not Found", status=404)
        keys = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (keys[0] if len(keys) == 1 else b"").partition(b" ")
        is_right = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        if not self._digest or (is_right and scheme.lower() == b"bearer"):
            return None
        # A browser's CORS preflight has no key, and vLLM's CORS middleware answers it.
        asked = {b"origin", b"access-control-request-method"} <= {name for name, _ in headers}
        if scope["type"] == "http" and (path in self._open_paths or (scope["method"] == "OPTIONS" and asked)):
            return None
        return RequestError("this server needs its API key: Authorization: Bearer KEY", status=401)


def hosts(text: str) -> list[str]:
    """Return the comma-separated names in lower case, to compare the Host header with."""
    return [name for part in text.split(",") if (name := part.strip().lower())]


def named_hosts(text: str, example: str = "--allow-hosts spark.local") -> list[str]:
    """Return the hosts that a user named. Raises UsageError, with `example`, unless each is a host."""
    names = hosts(text)
    if malformed := [name for name in names if name != "*" and not HOST.fullmatch(name)]:
        why = "it takes NAME, NAME:PORT or [IPV6]:PORT, comma-separated"
        raise UsageError(f"{malformed[0][:80]!r} is not a host", why, example)
    return names


def chosen_hosts(named: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of a command, or those in the environment if it names none. Raises UsageError."""
    own = named_hosts(",".join(named))
    return tuple(own or named_hosts(environment.get(HOSTS, ""), f"{HOSTS}=spark.local"))


def loopback_hosts(port: int) -> list[str]:
    """Return the Host header of a client on this machine, which omits port 80."""
    return [*(f"{name}:{port}" for name in LOOPBACK), *(LOOPBACK if port == 80 else ())]


def served_hosts(host: str, port: int, named: Sequence[str]) -> list[str]:
    """Return the Host headers of clients of a server that listens on the address `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not bound
        # Such a server has a key, which a foreign web page does not know.
        return loopback_hosts(port) if named else ["*"]
    literal = f"[{host}]" if ":" in host else host
    return [*loopback_hosts(port), *([] if literal in LOOPBACK else [f"{literal}:{port}"])]


def variables(key: str, key_file: str) -> dict[str, str]:
    """Return the environment that hands the key to the server; empty values overrule inherited ones."""
    return {KEY: key, KEY_FILE: key_file}


def listen_address(host: str, key_file: str | None) -> str:
    """Return the IP address that `host` names; empty is loopback. Raises UsageError for an open one without a key."""
    try:
        ip = ipaddress.ip_address({"": LOOPBACK[1], "localhost": LOOPBACK[1]}.get(host, host))
    except ValueError:
        why = "it takes an address of this machine, such as 127.0.0.1 or 192.168.1.20; 0.0.0.0 is all of them"
        raise UsageError(f"--host {host[:80]!r} is not an IP address", why, "hostname -I") from None
    if not ip.is_loopback and not key_file:
        why = "other machines reach that address, and without a key everybody there may use the server"
        raise UsageError(f"--host {ip} needs --api-key-file", why, f"{KEY_FIX} --host {ip}")
    return str(ip)


def refuse_key_argument(arguments: Iterable[str]) -> None:
    """Raise UsageError for a key among vLLM's arguments: everybody can read those with `ps`."""
    if any(meant(word, ("--api-key",)) or word.replace("_", "-").startswith("--api-key") for word in arguments):
        why, fix = "arguments can be read by every user of the machine", "key   # first put the key into that file"
        raise UsageError("--api-key may not be an argument", why, f"{KEY_FILE}={fix}")


def require_key(address: str, key: str) -> None:
    """Raise UsageError if other machines could use a server at `address` without its `key` or the key's file."""
    try:
        is_loopback = address == "localhost" or ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError as error:
        raise UsageError(f"{address[:60]!r} is not an address", str(error)[:100], f"{BIND}=127.0.0.1") from error
    if not is_loopback and not key:
        why = "every machine that reaches this one could use the server"
        make = "(umask 077; openssl rand -hex 32 > key); a container reads it as uid 1000: sudo chown 1000 key"
        fix = f"{make}; sudo chmod 440 key; then SPARKFORGE_API_KEY=./key, or {KEY_FILE} in docker run"
        raise UsageError(f"{address} would open the server without an API key", why, f"{fix}; or {BIND}=127.0.0.1")


def has_host_network(interfaces: Path = Path("/sys/class/net")) -> bool:
    """Tell whether this process sees the machine's own network cards: outside a container, or with --network host."""
    return any(interfaces.glob("*/device"))  # a bridge network's have none (Linux, ABI sysfs-class-net)


def refuse_inherited_key(environment: Mapping[str, str]) -> None:
    """Raise UsageError for a key in the environment of `./inv up`: its clients would not know it."""
    if environment.get(KEY):
        fix = f"unset {KEY}   # --api-key-file names the file"
        raise UsageError(f"{KEY} is set", "the key of a server comes from a file", fix)


def key_path(option: str | None) -> Path | None:
    """Return the file that --api-key-file names; None without the option. Raises UsageError for an empty name."""
    if option == "":
        why = "an empty name would start a server without a key"
        raise UsageError("--api-key-file names no file", why, KEY_FIX)
    return typed(option).absolute() if option is not None else None


def read_key(path: Path, *, private: bool = True) -> str:
    """Return the API key in a file: one line of printable ASCII. Raises StorageError for anything but a usable key.

    `private` refuses a file that other users can read or change; a container's secret has to be readable for its user.
    """
    make = f"(umask 077; openssl rand -hex 32 > {shlex.quote(str(path))})"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block
        try:
            status = os.fstat(descriptor)
            data = os.read(descriptor, LONGEST_KEY + 1) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        why = f"{error.strerror or error} (as uid {os.getuid()})"
        fix = make if isinstance(error, FileNotFoundError) else on("ls -lL", existing_part(path))
        raise StorageError(f"cannot read the API key in {path}", why, fix, code="storage.access") from error
    key = data.decode("ascii", "replace").strip()
    failure, why, fix = "", "", on("ls -lL", path)
    if not stat.S_ISREG(status.st_mode):
        failure, why = f"cannot read the API key in {path}", "it is not a regular file"
    elif private and status.st_uid not in {0, os.geteuid()}:
        failure, why = f"the API key in {path} is not ours", f"its owner is uid {status.st_uid}"
    # The content is checked before the mode, so that no advice changes or overwrites a file with other content.
    elif len(data) > LONGEST_KEY or not KEY_TEXT.fullmatch(key):
        why = "it must hold one line of printable ASCII without spaces" if data.strip() else "it is empty"
        failure = f"there is no API key in {path}"
        fix = on("less", path, "or name a file that holds the key alone") if data.strip() else make
    elif status.st_mode & (stat.S_IRWXO | stat.S_IWGRP if private else stat.S_IWOTH):
        why = f"other users can read or change it (mode {stat.S_IMODE(status.st_mode):04o})"
        failure, fix = f"the API key in {path} is not secret", on("chmod 600", path)
    if failure:
        raise StorageError(failure, why, fix, code="storage.access")
    return key


def configured_key(environment: Mapping[str, str]) -> tuple[str, Path]:
    """Return the key of a container's secret, empty if it has none, and its file. Raises what `read_key` raises."""
    named = environment.get(KEY_FILE)
    path = Path(named or SECRET)
    with suppress(OSError):  # read_key raises with the reason
        if stat.S_ISCHR(path.stat().st_mode):  # Compose mounts /dev/null where no file is named
            return "", path
    if not named and not path.exists():
        return "", path
    return read_key(path, private=False), path


def digest(key: str) -> str:
    """Return the sha256 of a key, with which the health check notices a changed key; empty for none."""
    return hashlib.sha256(key.encode()).hexdigest() if key else ""
