"""Access control: key files, and the ASGI guard."""

import asyncio
import os

import pytest
from expected import refused

from sparkforge.core.errors import UsageError
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import access
from sparkforge.serve.devices import container as docker_device
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan

GUARDED = ["/invocations", "/v1/chat/completions", "/docs", "/metrics", "", "/health/", "//health"]


@pytest.fixture
def guard(monkeypatch):
    """Return a function that makes a guard of an environment; a call of the guard returns the status, or `passed`."""

    async def application(_scope, _receive, send):
        await send({"type": "passed"})

    def make(**environment):
        for name in (access.KEY, access.KEY_FILE, access.HOSTS, access.METRICS):
            monkeypatch.setenv(name, environment.get(name, ""))
        guard = access.Guard(application)

        def ask(path="/v1/models", *headers, kind="http", method="GET", root_path=""):
            ask.sent = []

            async def send(message):
                ask.sent.append(message)

            scope = {"type": kind, "path": path, "root_path": root_path, "method": method, "headers": list(headers)}
            asyncio.run(guard(scope, None, send))  # None: it does not read the body
            return ask.sent[0].get("status", ask.sent[0]["type"])

        return ask

    return make


def bearer(key):
    return (b"authorization", b"Bearer " + key)


KEY = {"VLLM_API_KEY": "sesame"}
CORS = (b"access-control-request-method", b"POST")


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", GUARDED)
def test_everything_but_health_needs_the_key(guard, path, kind):
    ask = guard(**KEY)
    refused = 401 if kind == "http" else "websocket.close"
    for headers in (
        [], [bearer(b"wrong")], [bearer(b"")], [bearer(b"sesame"), bearer(b"wrong")], [(b"x-api-key", b"wrong")],
        [bearer(b"wrong"), (b"x-api-key", b"sesame")],
        *([(b"authorization", value)] for value in (b"Basic sesame", b"sesame", b"Bearer \xff\xfe")),
    ):  # fmt: skip
        assert ask(path, *headers, kind=kind) == refused
    assert ask(path, bearer(b"sesame"), kind=kind) == "passed"
    assert ask(path, (b"authorization", b"bearer  sesame "), kind=kind) == "passed"
    assert ask(path, (b"x-api-key", b"sesame"), kind=kind) == "passed"


@pytest.mark.parametrize(
    ("environment", "path", "more", "status"),
    [
        *((KEY, "/v1/models", {"method": method}, 401) for method in ("HEAD", "POST", "DELETE", "OPTIONS", "TRACE")),
        (KEY, "/health", {}, "passed"),
        (KEY, "/health", {"kind": "websocket"}, "websocket.close"),
        ({**KEY, "SPARKFORGE_METRICS": "open"}, "/metrics", {}, "passed"),
        ({**KEY, "SPARKFORGE_METRICS": "open"}, "/metrics/x", {}, 401),
        # Paths are compared as by the router.
        (KEY, "/llm/health", {"root_path": "/llm"}, "passed"),
        (KEY, "/llm/v1/models", {"root_path": "/llm"}, 401),
        ({}, "/llm/scale_elastic_ep", {"root_path": "/llm"}, 404),
        *(({}, path, {"method": "POST"}, 404) for path in sorted(access.CLOSED_PATHS)),
        ({**KEY, "SPARKFORGE_ALLOWED_HOSTS": "x"}, "", {"kind": "lifespan"}, "passed"),
    ],
)
def test_who_passes_without_a_key(guard, environment, path, more, status):
    assert guard(**environment)(path, **more) == status


def test_preflights_reach_vllms_cors_and_a_key_opens_no_closed_route(guard):
    ask = guard(**KEY)
    assert ask("/v1/models", (b"origin", b"http://x"), CORS, method="OPTIONS") == "passed"
    assert ask("/v1/models", (b"origin", b"http://x"), CORS, method="POST") == 401
    start, body = ask.sent
    assert dict(start["headers"])[b"www-authenticate"] == b"Bearer"
    assert b'"message": "this server needs its API key' in body["body"]
    assert ask(min(access.CLOSED_PATHS), bearer(b"sesame"), method="POST") == 404


LOOPBACK = ",".join([*access.loopback_hosts(8000), "spark.local"])
OWN_HOSTS = [b"localhost:8000", b"127.0.0.1:8000", b"[::1]:8000", b"LocalHost:8000", b"spark.local", b"spark.local:9"]
FOREIGN_HOSTS = [
    b"evil.example", b"evil.example:8000", b"localhost", b"localhost:8001", b"localhost:8000:8000", b"", b"*", b"[::1",
    b"127.0.0.1.evil.example:8000", b"evil.example,localhost:8000", b"x@localhost:8000", b"\xff",
]  # fmt: skip


def test_only_this_machines_names_are_hosts_also_without_a_key(guard):
    ask = guard(SPARKFORGE_ALLOWED_HOSTS=LOOPBACK)
    for good in OWN_HOSTS:
        assert ask("/v1/models", (b"host", good)) == "passed"
    for bad in FOREIGN_HOSTS:
        assert ask("/health", (b"host", bad)) == 403, bad
        assert ask("/v1/realtime", (b"host", bad), kind="websocket") == "websocket.close", bad
    assert ask("/v1/models") == 403
    assert ask("/v1/models", (b"host", OWN_HOSTS[0]), (b"host", FOREIGN_HOSTS[0])) == 403
    on_port_80 = ",".join(access.loopback_hosts(80))
    for allowed, host in {"*": b"any.example", "": b"any.example", on_port_80: b"localhost"}.items():
        assert guard(SPARKFORGE_ALLOWED_HOSTS=allowed)("/v1/models", (b"host", host)) == "passed"


@pytest.mark.parametrize("environment", [{"SPARKFORGE_API_KEY_FILE": "/k"}, {"SPARKFORGE_METRICS": "opne"}])
def test_invalid_settings_end_the_server(guard, environment):
    with pytest.raises(RuntimeError, match="SPARKFORGE_"):
        guard(**environment)


@pytest.mark.parametrize(
    ("data", "mode", "why", "why_in_container"),
    [
        (b"sesame\n", 0o600, "", ""),
        (b"sesame\n", 0o640, "", ""),
        (b"sesame", 0o644, "chmod 600", ""),  # a container's user must be able to read its secret
        (b"sesame", 0o646, "chmod 600", "chmod 600"),
        *((b"sesame", mode, "chmod 600", None) for mode in (0o604, 0o602, 0o620, 0o601)),
        *((data, 0o600, "empty", "empty") for data in (b"", b" \n")),
        *(
            (data, 0o600, "one line", "one line")
            for data in (b"a\nb", b"a b", b"\xc3\xa4", b"a\x1b]52;c;x\x07", b"a" * 5000, b"\xff")
        ),
    ],
)
def test_a_key_file_holds_one_line_for_its_owner_alone(key_file, data, mode, why, why_in_container):
    key_file.write_bytes(data)
    key_file.chmod(mode)
    for read, message in (
        (lambda: access.read_key(key_file), why),
        (lambda: access.configured_key({access.KEY_FILE: str(key_file)})[0], why_in_container),
    ):
        if message:
            with refused("storage.access", message) as caught:
                read()
            assert (message != "one line") or caught.value.fix.startswith("less ")  # the file may be something else
        elif message == "":
            assert read() == "sesame"


def test_special_files_are_refused_without_hanging(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "absent", "."):
        with refused("storage.access", "cannot read the API key"):
            access.read_key(tmp_path / name)
    with refused("storage.access", "cannot read"):
        access.configured_key({access.KEY_FILE: str(tmp_path / "absent")})
    assert access.configured_key({access.KEY_FILE: os.devnull})[0] == ""  # mounted by Compose without a key file


def test_the_embedded_server_is_guarded_and_gets_its_key_in_the_environment_only(key_file, tmp_path):
    for key, key_path, last in (("sesame", str(key_file), ("--disable-fastapi-docs",)), ("", None, ())):
        plan = StartPlan(EMBEDDED, model_id="m", key_file=key_path, hosts=("spark.local",))
        launch = in_environment.Embedded(plan, tmp_path, tmp_path).launch()
        assert "sesame" not in f"{launch.command} {launch}".replace(str(launch.environment), "")
        assert launch.command[-2 - len(last) :] == ("--middleware", "sparkforge.serve.access.Guard", *last)
        assert launch.environment[access.KEY] == launch.plan.key == key
        assert launch.environment[access.HOSTS] == "localhost:8000,127.0.0.1:8000,[::1]:8000,spark.local"
        assert launch.environment["VLLM_SERVER_DEV_MODE"] == "0"


def test_a_key_is_read_from_the_given_file(monkeypatch):
    for make in (in_environment.Embedded, docker_device.variables):
        with pytest.raises(UsageError, match="names no file"):
            make(StartPlan(EMBEDDED, key_file=""))
    monkeypatch.setenv(access.KEY, "sesame")
    with pytest.raises(UsageError, match="--api-key-file") as caught:
        in_environment.Embedded(StartPlan(EMBEDDED))
    assert "sesame" not in str(caught.value)
