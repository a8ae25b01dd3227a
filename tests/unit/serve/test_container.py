"""Starts of the container that succeed and that fail: a fake engine, a stand-in `docker`, a real API server."""

import json
from datetime import UTC, datetime

import misbehaving
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from expected import refused

from sparkforge.core import errors, paths
from sparkforge.image import compose as docker_compose
from sparkforge.image import signing
from sparkforge.serve import first_answers, launch, record, restarts, status
from sparkforge.serve.devices import container as docker_device
from sparkforge.serve.devices.device import run
from sparkforge.serve.record import StartPlan

REFUSAL = """\
validate · profile embedded · this machine · 2026-11-21T07:00:00+00:00
ok   port-free    port 8000 is free
WARN cpu-instructions  this processor has no avx512f
       next: ./inv up   # a processor with avx512f is faster
FAIL memory-host  2.0 GiB can be had, wanted 4.1 GiB
       next: ps aux --sort=-rss | head   # stop something large
       read: docs/reference/checks.md#memory-host
refuse: the server must not start · 1 passed, 0 warned, 1 failed, 0 skipped
"""


@pytest.fixture
def api():
    """The port of an OpenAI-shaped server that gives one token to a client with the key."""
    with misbehaving.answering("needs the key") as port:
        yield port


@pytest.fixture
def checkout(tmp_path, empty_root, unchecked_port, api, docker_command, fake_engine):
    """A checkout with Compose files; the stand-in `docker` resolves them to a service on the API server's port."""
    (empty_root / "docker-compose.yml").write_text("services: {}\n")
    (tmp_path / "key").write_text("sesame\n")
    fake_engine.container["Image"] = fake_engine.image["Id"]
    # A recorded key file counts only if the container mounts it.
    fake_engine.container["Mounts"] = [{"Source": str(tmp_path / "key"), "Destination": "/run/secrets/api_key"}]
    service = {
        "image": "sparkforge/vllm:embedded",
        "ports": [{"host_ip": "127.0.0.1", "published": str(api), "target": 8000}],
        "environment": {"SPARKFORGE_PROFILE": "embedded", "SPARKFORGE_STACK": "embedded", "EMPTY": None},
    }
    config = {"services": {"vllm": service}, "secrets": {"api_key": {"file": str(tmp_path / "key")}}}
    docker_command.answers("compose version", out="Docker Compose version 2.26.1\n")
    docker_command.answers("config --format json", out=json.dumps(config))
    docker_command.answers("logs", out="the log\n")
    return empty_root


IMAGE, ABSENT = r"GET /images/.+/json", lambda _query: (404, {"message": "No such image: x"})


def up(device="docker-cpu", build=None, **options):
    build = build or (lambda *_: pytest.fail("nothing is to be built"))
    return run(docker_device.Container(StartPlan(device, **options), build))


def change_config(docker_command, change):
    """Change the project that Compose resolves: `change` edits the one of `checkout`, or returns another output."""
    for rule in (docker_command.folder / "rules").iterdir():
        if (rule / "pattern").read_text().startswith("config"):
            config = json.loads((rule / "out").read_text())
            (rule / "out").write_text(change(config) or json.dumps(config))


def called(docker_command, method):
    return [call for call in docker_command.calls if method in call]


def test_a_healthy_container_that_gives_a_token_is_recorded(checkout, fake_engine, docker_command, api, capsys):
    server = up(port=api)
    assert record.running() == server
    assert (server.model_id, server.device, server.container[:6]) == ("tiny-gpt-oss", "docker-cpu", "c0ffee")
    assert server.url == f"http://127.0.0.1:{api}"
    files = f"--file {checkout}/docker-compose.yml"
    project = f"compose --project-name sparkforge --project-directory {checkout}"
    assert called(docker_command, " up ") == [f"{project} {files} up --detach --no-build vllm"]
    captured = capsys.readouterr()
    assert "first answers received, proved: a JSON answer, " in captured.out + captured.err
    status.show_status(server)
    out = capsys.readouterr().out
    for words in ("healthy, the container says healthy", "proved: a JSON answer, ", "container c0ffeec0ffee"):
        assert words in out
    assert launch.stop() == server
    assert called(docker_command, " --profile * down"), "the optional services, such as Prometheus, are in profiles"
    assert record.read() is None


def fails(error, docker_command, **more):
    with pytest.raises(error) as caught:
        up(**more)
    assert called(docker_command, " stop vllm")
    assert record.read() is None
    return caught.value


HELD = f"{restarts.TOO_OFTEN}: 3 times within 60 min; the last time it was out of memory"
WAITS = "refused: the validator refuses to serve; validates again"
KERNEL = "INFO 11-21 03:40:12 [x.py:1] a\nRuntimeError: no such kernel\n"
REASON, MEMORY = "RuntimeError: no such kernel", "FAIL memory-host  2.0 GiB can be had, wanted 4.1 GiB"


def health(status, output):
    return {"Health": {"Status": status, "Log": [{"Output": output}]}}


@pytest.mark.parametrize(
    ("state", "more", "log", "what", "why"),
    [
        ({"Status": "exited", "ExitCode": 30}, {}, REFUSAL, "", MEMORY),
        ({"Status": "restarting", "ExitCode": 30}, {}, REFUSAL, "", MEMORY),
        # A container that waits after a refusal has failed, whether Docker has restarted it or not.
        (health("starting", WAITS), {}, f"{REFUSAL}✗ the validator refuses to serve\n", "", MEMORY),
        ({"Health": {}}, {"RestartCount": 1}, f"{REFUSAL}✗ the validator refuses to serve\n", "", MEMORY),
        (health("starting", HELD), {}, "", "", HELD),
        ({"Status": "exited", "ExitCode": 1}, {}, KERNEL, "ended with code 1", REASON),
        ({"Status": "exited", "OOMKilled": True}, {}, KERNEL, "memory limit", REASON),
        (health("unhealthy", "no /run/ready"), {}, KERNEL, "unhealthy: no /run/ready", REASON),
        ({}, {"RestartCount": 1}, KERNEL, "Docker started it again", REASON),
    ],
)
def test_a_failed_start_gives_its_reason(checkout, fake_engine, docker_command, state, more, log, what, why):
    fake_engine.container["State"] |= state
    fake_engine.container |= more
    fake_engine.log = log
    error = fails(errors.RefusalError if why == MEMORY else errors.ServerError, docker_command)
    assert what in error.what
    assert error.why.startswith(why)
    if why == MEMORY:
        assert error.fix.startswith("ps aux --sort=-rss | head   # stop something large; then ")
    elif what:
        assert error.fix == "./inv doctor   # the whole log: docker logs c0ffeec0ffee"


def test_a_refusal_in_the_log_of_an_earlier_run_does_not_count(checkout, fake_engine, docker_command):
    fake_engine.container["State"] |= {"Status": "exited", "ExitCode": 1, "StartedAt": "2026-11-21T10:00:00.123456789Z"}
    began = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()

    def logs(query):
        earlier = not began - 60 < float(query.get("since", 0)) <= began
        fake_engine.log = (REFUSAL + "✗ the validator refuses to serve\n" if earlier else "") + "RuntimeError: new\n"
        return 200, fake_engine.frames()

    fake_engine.routes[r"GET /containers/\w+/logs"] = logs
    assert fails(errors.ServerError, docker_command).why == "RuntimeError: new"


@pytest.mark.parametrize(("fault", "what"), [("it vanishes", ""), ("it starts", "in time"), ("a key", "Unauthorized")])
def test_a_container_that_vanishes_takes_too_long_or_gives_no_token_is_stopped(
    checkout, fake_engine, docker_command, monkeypatch, tmp_path, fault, what
):
    if fault == "it vanishes":
        fake_engine.routes[r"GET /containers/\w+/json"] = lambda query: (404, {"message": "No such container: c0ffee"})
    elif fault == "it starts":
        monkeypatch.setattr(docker_device, "READY_SECONDS", 0.1)
        fake_engine.container["State"]["Health"]["Status"] = "starting"
    else:
        (tmp_path / "key").write_text("wrong")
    assert what in fails(errors.ServerError, docker_command).what


def test_ctrl_c_while_waiting_stops_the_container(checkout, fake_engine, docker_command):
    def interrupted(_text):
        raise KeyboardInterrupt

    device = docker_device.Container(StartPlan("docker-cpu"), pytest.fail)
    device.prepare()
    with pytest.raises(KeyboardInterrupt):
        device.serve(interrupted)
    assert called(docker_command, " down"), "Ctrl-C removes the container"
    assert record.read() is None


def test_a_container_that_a_killed_start_did_not_record_is_removed(checkout, fake_engine, docker_command):
    route, begun = fake_engine.routes["GET /containers/json"], []
    fake_engine.routes["GET /containers/json"] = lambda query: (
        begun.append(record.begun_path().exists()) or route(query)
    )
    up()
    assert begun[0], "a start is noted before its container is there"
    launch.stop()
    record.begun_path().write_text("")  # left by a killed start
    assert launch.down() is None
    with refused("server.not-running"):
        launch.down()
    record.begun_path().write_text("")
    with launch.starting():
        assert not record.begun_path().exists()
    assert len(called(docker_command, " down")) == 3


def test_a_missing_image_is_built_first(checkout, fake_engine):
    route, built = fake_engine.routes[IMAGE], []
    fake_engine.routes[IMAGE] = ABSENT

    def build(stack, _steps):
        built.append(stack)
        fake_engine.routes[IMAGE] = route

    up(build=build)
    assert built == ["embedded"]


def test_a_service_with_a_gpu_needs_one_and_names_the_cpu_device(checkout, fake_engine, docker_command):
    deploy = {"resources": {"reservations": {"devices": [{"count": 1}]}}}
    change_config(docker_command, lambda config: config["services"]["vllm"].update(deploy=deploy))
    with pytest.raises(errors.EngineError, match="--device docker-cpu"):
        up("docker")
    assert not called(docker_command, "up")


def test_a_known_good_image_is_served_by_its_id_and_never_built(checkout, fake_engine, docker_command, api):
    server = up(port=api, image="sha256:old", variables={"MAX_MODEL_LEN": "64"})
    (call,) = called(docker_command, " up ")
    override = paths.state() / "rollback.compose.json"
    assert f"--file {override} up" in call
    assert json.loads(override.read_text()) == {"services": {"vllm": {"image": "sha256:old"}}}
    assert record.running() == server
    launch.stop()
    fake_engine.routes[IMAGE] = ABSENT
    with pytest.raises(errors.EngineError, match="there is no image sha256:old"):
        up(port=api, image="sha256:old")


def test_a_key_file_without_a_key_and_an_open_address_without_one_are_refused_before_anything_starts(
    checkout, fake_engine, docker_command, tmp_path
):
    (tmp_path / "key").write_text("")
    with pytest.raises(errors.StorageError, match="no API key"):
        up()

    def change(config):
        config["services"]["vllm"]["ports"][0]["host_ip"] = "0.0.0.0"  # noqa: S104 - it is refused
        config["secrets"]["api_key"]["file"] = "/dev/null"

    change_config(docker_command, change)
    with pytest.raises(errors.UsageError, match=r"0\.0\.0\.0 would open the server without an API key"):
        up()
    assert not called(docker_command, " up ")


@pytest.mark.parametrize(
    ("version", "rootless", "warned"),
    [("27.5.1", False, True), ("28.0.0", False, False), ("26.1.5", True, False), ("dev", False, False)],
)  # fmt: skip
def test_docker_before_28_gives_a_warning(checkout, fake_engine, capsys, version, rootless, warned):
    fake_engine.info |= {"ServerVersion": version, "SecurityOptions": ["name=rootless"] if rootless else []}
    up()
    assert ("lets other machines of the same layer-2 network reach" in capsys.readouterr().err) == warned


def test_options_become_the_variables_that_compose_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-gpt-oss"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    plan = StartPlan(
        "docker", "my-gpt-oss", port=8001, stack="spark-next", profiled=True, profile="safe", key_file="key",
        hosts=("Spark.local", "localhost:9000"),
    )  # fmt: skip
    assert docker_device.variables(plan) == {
        "PORT": "8001", "SPARKFORGE_STACK": "spark-next", "SPARKFORGE_PROFILER": "/var/cache/sparkforge/profiler",
        "SPARKFORGE_SERVE_PROFILE": "safe", "SPARKFORGE_MODELS": str(tmp_path),
        "SPARKFORGE_MODEL": "/models/my-gpt-oss", "SPARKFORGE_API_KEY": str(tmp_path / "key"),
        "SPARKFORGE_ALLOWED_HOSTS": "spark.local,localhost:9000",
    }  # fmt: skip
    with pytest.raises(errors.UsageError, match="choose from safe"):
        docker_device.variables(StartPlan("docker", profile="quick"))
    with pytest.raises(errors.InputError):
        docker_device.variables(StartPlan("docker", str(tmp_path)))


@pytest.mark.parametrize(
    ("model", "options", "served"),
    [
        ("@MODEL@", {"tiny_first": True}, ["tiny-gpt-oss"]),
        ("@MODEL@", {}, []),
        ("/models/of-a-compose-file", {"tiny_first": True}, []),
    ],
)
def test_on_a_gpu_the_tiny_model_answers_first_in_the_same_container(
    checkout, fake_engine, docker_command, monkeypatch, capsys, model, options, served
):
    def change(config):
        service = config["services"]["vllm"]
        service["deploy"] = {"resources": {"reservations": {"devices": [{"driver": "nvidia"}]}}}
        service["environment"]["SPARKFORGE_MODEL"] = model

    compared = []
    fake_engine.info["Runtimes"]["nvidia"] = {"path": "nvidia-container-runtime"}
    monkeypatch.setattr(first_answers, "compare", lambda endpoint: compared.append(endpoint.model) or 0.012)
    monkeypatch.setenv("SPARKFORGE_MODEL", "/models/gpt-oss-20b")
    change_config(docker_command, change)
    server = up(device="docker", **options)
    assert compared == served
    assert server.model == (model if model[0] == "/" else "/models/gpt-oss-20b")
    assert len(called(docker_command, " up ")) == 1 + len(served)
    assert len(called(docker_command, " stop vllm")) == len(served), "the optional services keep running"
    output = "".join(capsys.readouterr())
    assert ("differ by 0.012 from float32" in output) == bool(served)
    assert ("the Compose files do not read SPARKFORGE_MODEL" in output) == (model[0] == "/")


def test_an_image_that_trust_toml_does_not_take_is_not_started(checkout, fake_engine, docker_command, trust_file):
    public = signing.public_text(Ed25519PrivateKey.generate())
    text = f'schema = 1\n[keys.lab]\npublic = """{public}"""\n[images]\ndemand = ["signature"]\n'
    trust_file.write_text(text)
    with pytest.raises(errors.IntegrityError, match=r"trust\.toml demands signature by lab: nothing is attached to it"):
        up()
    fake_engine.routes[IMAGE] = ABSENT
    with pytest.raises(errors.IntegrityError, match="an image built now would be refused") as error:
        up()
    assert "./inv image.sign KEY" in error.value.fix
    assert not called(docker_command, " up ")
    assert not called(docker_command, " build ")


def test_a_proved_start_is_the_last_accepted_image_and_only_a_rollback_may_be_older(
    checkout, fake_engine, monkeypatch, api
):
    times = {False: "2026-11-02T00:00:00Z", True: "2026-11-01T00:00:00Z"}  # by whether it is a rollback
    monkeypatch.setattr(
        docker_device.trust, "require", lambda *_, back: docker_device.trust.Evidence(finished=times[back])
    )
    for options, back in (({}, False), ({"image": fake_engine.image["Id"]}, True)):
        up(port=api, **options)
        assert json.loads((paths.state() / "accepted-images.json").read_text()) == {"embedded": times[back]}
        launch.stop()


def test_logs_are_the_containers_also_of_one_that_has_stopped(checkout, fake_engine, docker_command, capfd):
    container = up().container
    for follow in (False, True):
        status.show_log(follow=follow)
    assert capfd.readouterr().out == "the log\n" * 2
    assert called(docker_command, "logs ") == [f"logs {container}", f"logs --follow {container}"]
    fake_engine.container["State"] |= {"Status": "exited", "ExitCode": 1}
    fake_engine.log = "RuntimeError: no such kernel\n"
    assert docker_device.last_log() == fake_engine.log
    fake_engine.routes["GET /containers/json"] = lambda query: (200, [])
    assert docker_device.last_log() == ""


def test_compose_files_of_the_user_come_last_and_one_without_the_service_is_named(
    checkout, docker_command, monkeypatch, tmp_path
):
    (checkout / "docker-compose.override.yml").write_text("services: {}\n")
    (tmp_path / "ci.yml").write_text("services: {}\n")
    monkeypatch.setenv("SPARKFORGE_COMPOSE_FILES", str(tmp_path / "ci.yml"))
    names = [path.name for path in docker_compose.files()]
    assert names == ["docker-compose.yml", "docker-compose.override.yml", "ci.yml"]
    for text in ('{"services": {"vllm": {"image": "x"}}}', "{"):
        change_config(docker_command, lambda _config, text=text: text)
        with pytest.raises(errors.EngineError, match=r"docker compose .* config"):
            docker_compose.resolve({})
    monkeypatch.setenv("SPARKFORGE_COMPOSE_FILES", "none.yml")
    with pytest.raises(errors.UsageError, match=r"none\.yml"):
        docker_compose.files()
