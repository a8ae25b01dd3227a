"""Who may ask: key files, and the guard on the level of ASGI."""

import asyncio
import os

import pytest

from sparkforge.core.errors import StorageError, UsageError
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import access
from sparkforge.serve.devices import container as docker_device
from sparkforge.serve.devices import embedded
from sparkforge.serve.plan import StartPlan

OPEN_PATHS = ["/health"]
GUARDED = [
    "/invocations",
    "/v1/chat/completions",
    "/tokenize",
    "/docs",
    "/load",
    "/metrics",
    "/",
    "",
    "/health/",
    "//health",
]


@pytest.fixture
def guard(monkeypatch):
    """Make a guard with an environment, and ask it: the status, or `passed`."""

    def make(**environment):
        for name in (access.KEY, access.KEY_FILE, access.HOSTS, access.METRICS):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        async def application(scope, receive, send):
            await send({"type": "passed"})

        built = access.Guard(application)

        def ask(path="/v1/models", *headers, kind="http", method="GET", root_path=""):
            sent = []

            async def send(message):
                sent.append(message)

            async def receive():
                return pytest.fail("the guard has no business with the body")

            scope = {"type": kind, "path": path, "root_path": root_path, "method": method, "headers": list(headers)}
            asyncio.run(built(scope, receive, send))
            ask.sent = sent
            return sent[0].get("status", sent[0]["type"])

        return ask

    return make


def bearer(key):
    return (b"authorization", b"Bearer " + key)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", GUARDED)
def test_everything_but_health_needs_the_key(guard, path, kind):
    ask = guard(VLLM_API_KEY="sesame")
    refused = 401 if kind == "http" else "websocket.close"
    assert ask(path, kind=kind) == refused
    assert ask(path, bearer(b"wrong"), kind=kind) == refused
    assert ask(path, bearer(b""), kind=kind) == refused
    assert ask(path, bearer(b"sesame"), bearer(b"wrong"), kind=kind) == refused
    assert ask(path, (b"authorization", b"Basic sesame"), kind=kind) == refused
    assert ask(path, (b"authorization", b"sesame"), kind=kind) == refused
    assert ask(path, (b"authorization", b"Bearer \xff\xfe"), kind=kind) == refused
    assert ask(path, bearer(b"sesame"), kind=kind) == "passed"
    assert ask(path, (b"authorization", b"bearer  sesame "), kind=kind) == "passed"


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_every_method_needs_the_key(guard, method):
    assert guard(VLLM_API_KEY="sesame")("/v1/models", method=method) == 401


def test_a_refusal_is_an_error_as_openai_has_it(guard):
    ask = guard(VLLM_API_KEY="sesame")
    ask()
    start, body = ask.sent
    assert dict(start["headers"])[b"www-authenticate"] == b"Bearer"
    assert b'"message": "this server needs its API key' in body["body"]


def test_health_is_open_and_metrics_where_asked_for(guard):
    assert guard(VLLM_API_KEY="sesame")("/health") == "passed"
    assert guard(VLLM_API_KEY="sesame")("/health", kind="websocket") == "websocket.close"
    assert guard(VLLM_API_KEY="sesame", SPARKFORGE_METRICS="open")("/metrics") == "passed"
    assert guard(VLLM_API_KEY="sesame", SPARKFORGE_METRICS="open")("/metrics/x") == 401


def test_a_path_is_compared_as_the_router_compares_it(guard):
    ask = guard(VLLM_API_KEY="sesame")
    assert ask("/llm/health", root_path="/llm") == "passed"
    assert ask("/llm/v1/models", root_path="/llm") == 401
    assert guard()("/llm/scale_elastic_ep", root_path="/llm") == 404


def test_a_browsers_preflight_passes_to_vllms_cors(guard):
    ask, question = guard(VLLM_API_KEY="sesame"), (b"access-control-request-method", b"POST")
    assert ask("/v1/models", (b"origin", b"http://x"), question, method="OPTIONS") == "passed"
    assert ask("/v1/models", (b"origin", b"http://x"), question, method="POST") == 401


@pytest.mark.parametrize("path", sorted(access.CLOSED_PATHS))
def test_routes_that_one_machine_has_no_use_for_are_off(guard, path):
    assert guard()(path, method="POST") == 404
    assert guard(VLLM_API_KEY="sesame")(path, bearer(b"sesame"), method="POST") == 404


def host(text):
    return (b"host", text)


FOREIGN_HOSTS = [
    b"evil.example", b"evil.example:8000", b"localhost", b"localhost:8001", b"localhost:8000:8000", b"", b"*", b"[::1",
    b"127.0.0.1.evil.example:8000", b"evil.example,localhost:8000", b"x@localhost:8000", b"\xff",
]  # fmt: skip


def test_only_this_machines_names_are_hosts_also_without_a_key(guard):
    ask = guard(SPARKFORGE_ALLOWED_HOSTS=",".join([*access.loopback_hosts(8000), "spark.local"]))
    for good in (
        b"localhost:8000",
        b"127.0.0.1:8000",
        b"[::1]:8000",
        b"LocalHost:8000",
        b"spark.local",
        b"spark.local:9",
    ):
        assert ask("/v1/models", host(good)) == "passed"
    for bad in FOREIGN_HOSTS:
        assert ask("/health", host(bad)) == 403, bad
        assert ask("/v1/realtime", host(bad), kind="websocket") == "websocket.close", bad
    assert ask("/v1/models") == 403
    assert ask("/v1/models", host(b"localhost:8000"), host(b"evil.example")) == 403


def test_every_host_may_be_allowed_and_port_80_goes_unsaid(guard):
    assert guard(SPARKFORGE_ALLOWED_HOSTS="*")("/v1/models", host(b"any.example")) == "passed"
    assert guard()("/v1/models", host(b"any.example")) == "passed"
    assert guard(SPARKFORGE_ALLOWED_HOSTS=",".join(access.loopback_hosts(80)))("/x", host(b"localhost")) == "passed"


@pytest.mark.parametrize("environment", [{"SPARKFORGE_API_KEY_FILE": "/k"}, {"SPARKFORGE_METRICS": "opne"}])
def test_settings_without_sense_end_the_server(guard, environment):
    with pytest.raises(RuntimeError, match="SPARKFORGE_"):
        guard(**environment)


def test_the_servers_own_start_and_end_pass(guard):
    assert guard(VLLM_API_KEY="sesame", SPARKFORGE_ALLOWED_HOSTS="x")(kind="lifespan") == "passed"


@pytest.fixture
def key_file(tmp_path):
    def write(data, mode=0o600):
        path = tmp_path / "key"
        path.write_bytes(data)
        path.chmod(mode)
        return path

    return write


def test_a_key_is_read_without_its_line_end(key_file):
    assert access.read_key(key_file(b"sesame\n")) == "sesame"
    assert access.read_key(key_file(b"sesame\n", 0o640)) == "sesame"


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "empty"), (b" \n", "empty"), (b"a\nb", "one line"), (b"a b", "one line"), (b"\xc3\xa4", "one line"),
     (b"a\x1b]52;c;x\x07", "one line"), (b"a" * 5000, "one line"), (b"\xff", "one line")],
)  # fmt: skip
def test_a_file_without_a_usable_key_is_refused(key_file, data, why):
    with pytest.raises(StorageError, match=why, check=lambda error: error.code == "storage.access"):
        access.read_key(key_file(data))
    with pytest.raises(StorageError, match=why, check=lambda error: error.code == "storage.access"):
        access.configured_key({access.KEY_FILE: str(key_file(data))})


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o666, 0o601])
def test_a_key_that_others_can_read_or_change_is_refused(key_file, mode):
    with pytest.raises(StorageError, match="chmod 600", check=lambda error: error.code == "storage.access"):
        access.read_key(key_file(b"sesame", mode))


def test_a_containers_secret_may_be_readable_but_not_writable_for_others(key_file):
    path = key_file(b"sesame", 0o644)
    assert access.configured_key({access.KEY_FILE: str(path)}) == ("sesame", path)
    with pytest.raises(StorageError, match="chmod 600", check=lambda error: error.code == "storage.access"):
        access.configured_key({access.KEY_FILE: str(key_file(b"sesame", 0o646))})


def test_what_is_no_file_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "absent", "."):
        with pytest.raises(
            StorageError, match="cannot read the API key", check=lambda error: error.code == "storage.access"
        ):
            access.read_key(tmp_path / name)


def test_a_container_without_a_secret_has_no_key(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "SECRET", str(tmp_path / "absent"))
    assert access.configured_key({})[0] == ""
    assert access.configured_key({access.KEY_FILE: os.devnull})[0] == ""  # what Compose mounts where none is named
    with pytest.raises(StorageError, match="cannot read", check=lambda error: error.code == "storage.access"):
        access.configured_key({access.KEY_FILE: str(tmp_path / "absent")})


def test_a_container_allows_the_named_hosts_and_its_own_health_check():
    assert access.container_hosts("") == ""
    assert access.container_hosts("vllm,") == "localhost,127.0.0.1,[::1],vllm"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "sesame"],
        ["--port", "1", "--api-key=sesame"],
        ["--api_key=sesame"],
        ["--api-ke", "sesame"],
        ["--api", "sesame"],
    ],
)
def test_a_key_on_the_command_line_is_refused_and_not_repeated(arguments):
    with pytest.raises(UsageError) as caught:
        access.refuse_key_argument(arguments)
    assert "sesame" not in str(caught.value)


def test_the_documentation_is_off_with_a_key():
    assert "--disable-fastapi-docs" in access.flags("sesame")
    assert access.flags("") == ("--middleware", "sparkforge.serve.access.Guard")


@pytest.mark.parametrize("text", ["http://x", "a b", "x:port", "x/y", "[::1"])
def test_a_word_that_is_no_host_is_refused(text):
    with pytest.raises(UsageError, match="is no host"):
        access.named_hosts(text)


def test_the_embedded_server_gets_its_key_in_the_environment_only(key_file, tmp_path):
    path = key_file(b"sesame\n")
    plan = StartPlan(EMBEDDED, model_id="m", key_file=str(path), hosts=("spark.local",))
    launch = embedded.Embedded(plan, tmp_path, tmp_path).launch()
    assert "sesame" not in f"{launch.command} {launch}".replace(str(launch.environment), "")
    assert launch.command[-3:] == ("--middleware", "sparkforge.serve.access.Guard", "--disable-fastapi-docs")
    assert launch.environment[access.KEY] == launch.plan.key == "sesame"
    assert launch.environment[access.HOSTS] == "localhost:8000,127.0.0.1:8000,[::1]:8000,spark.local"
    assert launch.environment["VLLM_SERVER_DEV_MODE"] == "0"


def test_without_a_key_the_guard_still_checks_the_host(tmp_path):
    launch = embedded.Embedded(StartPlan(EMBEDDED, model_id="m"), tmp_path, tmp_path).launch()
    assert launch.command[-2:] == ("--middleware", "sparkforge.serve.access.Guard")
    assert launch.environment[access.KEY] == launch.environment[access.KEY_FILE] == ""
    assert "localhost:8000" in launch.environment[access.HOSTS]


def test_a_key_from_the_environment_of_up_is_refused(monkeypatch):
    monkeypatch.setenv(access.KEY, "sesame")
    with pytest.raises(UsageError, match="--api-key-file") as caught:
        embedded.Embedded(StartPlan(EMBEDDED))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "device",
    [
        lambda: embedded.Embedded(StartPlan(EMBEDDED, key_file="")),
        lambda: docker_device.variables(StartPlan("docker-cpu", key_file="")),
    ],
)
def test_an_empty_name_of_a_key_file_is_no_way_to_have_none(device):
    with pytest.raises(UsageError, match="names no file"):
        device()
