"""The image without Compose: `docker run` as users type it, with Hugging Face's cache from a disk."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from waiting import wait_for

from sparkforge.core import openai
from sparkforge.core.errors import ServerError
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.serve import access

IMAGE = "sparkforge/vllm:embedded"
MODEL = "openai/gpt-oss-120b"  # the repository's name; its folder has the tiny model
COMMIT = "0123abc"
MOUNTED = "/root/.cache/huggingface"
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run/sparkforge:mode=1777", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges")  # fmt: skip
OFFLINE = (*HARDENED, "--network", "none")
# Further options of docs/guide/docker-run.md, with the memory that vLLM's CPU build needs.
LIMITED = (*HARDENED, "--shm-size", "1g", "--memory", "8g", "--memory-swap", "8g", "--pids-limit", "4096",
           "--restart", "on-failure:3")  # fmt: skip
STRANGER = 4321


@pytest.fixture(scope="module")
def cache(project, tmp_path_factory):
    """A Hugging Face cache whose snapshot of MODEL consists of links to the tiny model's files."""
    home = tmp_path_factory.mktemp("huggingface")
    home.chmod(0o777)
    arguments = ("python", "-m", "sparkforge.models.tiny", "/out/tiny")
    project.engine.docker("run", "--rm", "--user", os.getuid(), "-v", f"{home}:/out", IMAGE, *arguments)
    home.chmod(0o755)
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    for folder in (repository / "blobs", repository / "refs", repository / "snapshots" / COMMIT):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    for number, file in enumerate(path for path in (home / "tiny").iterdir() if path.is_file()):
        shutil.move(file, repository / "blobs" / f"b{number}")
        (repository / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/b{number}")
    return home


@pytest.fixture
def run(project):
    """Run the image: `run(words, options)` gives exit code and output; `run.start` leaves it running."""

    names = []

    class Run:
        def __call__(self, *arguments, options=()):
            command = ["docker", "run", "--rm", *map(str, options), IMAGE, *arguments]
            env = project.engine.environment
            result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
            return result.returncode, result.stdout + result.stderr

        def start(self, *arguments, options=()):
            name = f"sparkforge-docker-run-{len(names)}"
            project.engine.docker("rm", "--force", "--volumes", name, check=False)
            names.append(name)
            project.engine.docker("run", "--detach", "--name", name, *options, IMAGE, *arguments)
            return name

    yield Run()
    for name in names:
        project.engine.docker("rm", "--force", "--volumes", name, check=False)


@pytest.fixture
def key(tmp_path):
    """A file with an API key as in the guide: readable for uid 1000, not writable for others."""
    file = tmp_path / "key"
    file.write_text("c0ffee" * 10 + "\n")
    file.chmod(0o444)
    return file


@pytest.fixture
def open_address(engine):
    """An address of this machine that is not loopback: the engine's bridge, which other machines do not reach."""
    return json.loads(engine.docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]["Gateway"]


def require_served_with_the_key_alone(url, model, key):
    """Assert that a server answers a chat to clients with the key, and only /health to others."""
    secret = key.read_text().strip()
    assert Endpoint(url).healthy()
    for path in ("/v1/models", "/metrics", "/version"):
        for headers in ({}, openai.headers("wrong")):
            assert httpx.get(f"{url}{path}", headers=headers, trust_env=False).status_code == 401, path
    with pytest.raises(ServerError):
        list(Endpoint(url, model, key="").stream_chat([{"role": "user", "content": "Hello"}], 4))
    hello = [{"role": "user", "content": "Hello"}]
    assert "".join(delta.text for delta in Endpoint(url, model, key=secret).stream_chat(hello, 12)).strip()


def require_unprivileged(project, container, key):
    """Assert that a serving container has no privileged user, capabilities, writable files or visible key."""
    docker, secret = project.engine.docker, key.read_text().strip()
    status = docker("exec", container, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["Uid"].split()[0], fields["NoNewPrivs"]) == ("1000", "1")
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert "Read-only" in docker("exec", container, "sh", "-c", "touch /opt/sparkforge/x 2>&1 || true")
    commands = docker("exec", container, "sh", "-c", "cat /proc/[0-9]*/cmdline")
    assert secret not in json.dumps(project.engine.inspect(container)) + docker("logs", container, both=True) + commands


def test_figures_of_the_short_line_that_serves_from_the_users_cache(
    project, run, cache, free_port, figures, first_token
):
    def log():
        return project.engine.docker("logs", name, both=True)

    def require_running():
        assert project.engine.inspect(name)["State"]["Status"] == "running", log()[-6000:]

    name = ""
    for _ in range(figures.repeats):
        if name:
            project.engine.docker("stop", "--time", "60", name)
        port = free_port()
        options = ("--gpus", "all", "-p", f"127.0.0.1:{port}:8000", "-v", f"{cache}:{MOUNTED}", "--shm-size", "1g")
        words = ("vllm", "serve", MODEL, "--quantization", "mxfp4", "--max-model-len", "8192")
        with figures.measured("docker run to the first token"):
            name = run.start(*words, options=options)
            assert first_token(port, MODEL, require_running)
    models = project.engine.docker("exec", name, "python", "-c", ASK_MODELS)
    names = {(model["id"], model["max_model_len"]) for model in json.loads(models)["data"]}
    assert names == {(MODEL, 8192), (MODEL.partition("/")[2], 8192)}
    text = log()
    assert text.index("validate ·") < text.index("vLLM's API server starts")
    assert f"{MOUNTED}/hub/models--openai--gpt-oss-120b/snapshots/{COMMIT}" in text
    assert project.engine.docker("exec", name, "id", "-u").strip() == "1000"
    wait_for(lambda: project.engine.inspect(name)["State"]["Health"]["Status"] == "healthy", 900)
    assert "GET /v1/models" in log()
    assert "GET /health" not in log()
    project.engine.docker("stop", "--time", "60", name)
    assert project.engine.inspect(name)["State"]["ExitCode"] == 0
    assert "nanobind" not in log()


ASK_MODELS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/v1/models').read().decode())"


def test_the_hardened_line_serves_beyond_loopback_only_with_the_key(project, run, cache, key, open_address, free_port):
    port = free_port()
    mounts = ("-v", f"{cache / 'hub'}:{MOUNTED}/hub:ro", "-v", f"{key}:/run/secrets/api_key:ro")
    options = (*LIMITED, *mounts, "-p", f"{open_address}:{port}:8000", "-e", f"SPARKFORGE_BIND={open_address}")
    name = run.start("vllm", "serve", MODEL, options=options)

    def healthy():
        assert project.engine.inspect(name)["State"]["Status"] == "running", project.engine.docker("logs", name)[-6000:]
        return Endpoint(f"http://{open_address}:{port}").healthy()

    wait_for(healthy, 900)
    require_served_with_the_key_alone(f"http://{open_address}:{port}", MODEL, key)
    require_unprivileged(project, name, key)
    assert not Endpoint(f"http://127.0.0.1:{port}").healthy()  # only on the given address
    project.engine.docker("stop", "--time", "60", name)
    assert project.engine.inspect(name)["State"]["ExitCode"] == 0


def test_compose_serves_beyond_loopback_only_with_the_key(project, compose_project, key, open_address, free_port):
    port = free_port()
    bound = {"SPARKFORGE_BIND": open_address, "PORT": str(port), "SPARKFORGE_ALLOWED_HOSTS": open_address}
    without = compose_project(project.files, {**project.env, **bound}, "sparkforge-open")
    opened = compose_project(project.files, {**without.env, "SPARKFORGE_API_KEY": str(key)}, "sparkforge-open")
    try:
        with pytest.raises(AssertionError, match="would open the server without an API key"):
            without.compose("run", "--rm", "--no-deps", "vllm")
        opened.compose("up", "--detach", "--no-build", "vllm")
        opened.wait_healthy()
        url = f"http://{open_address}:{port}"
        require_served_with_the_key_alone(url, "tiny-gpt-oss", key)
        foreign = {**openai.headers(key.read_text().strip()), "Host": "elsewhere.example"}
        assert httpx.get(f"{url}/v1/models", headers=foreign, trust_env=False).status_code == 403
        require_unprivileged(project, opened.container(), key)
        ports = project.engine.inspect(opened.container())["NetworkSettings"]["Ports"]
        assert ports == {"8000/tcp": [{"HostIp": open_address, "HostPort": str(port)}]}
    finally:
        opened.compose("down", "--volumes", "--timeout", "20", check=False)


def test_a_server_that_always_fails_waits_longer_each_time_and_is_then_held(project, run):
    docker, inspect = project.engine.docker, project.engine.inspect
    options = ("--restart", "on-failure:3", "-e", "SPARKFORGE_VALIDATE=off")
    name = run.start("tiny", "--no-such-flag", options=options)
    wait_for(lambda: "the server ended too often" in docker("logs", name, both=True), 900)
    log = docker("logs", name, both=True)
    first, second = map(int, re.findall(r"the next one starts in (\d+) s", log))
    assert first <= 2 < second <= 8
    assert log.count("vLLM's API server starts") == 3
    assert (inspect(name)["State"]["Running"], inspect(name)["RestartCount"]) == (True, 3)
    wait_for(lambda: any("ended too often" in look["Output"] for look in inspect(name)["State"]["Health"]["Log"]), 900)


def test_a_validation_needs_no_privilege_and_writes_nothing_outside(run, cache):
    code, out = run("validate", MODEL, options=(*OFFLINE, "-v", f"{cache}:{MOUNTED}:ro"))
    assert code == 0, out
    assert "ok   model-files" in out


@pytest.fixture
def strangers_cache(cache, tmp_path):
    """A copy of the cache that belongs to a user unknown to the image and is closed to others."""
    folder = tmp_path / "huggingface"
    shutil.copytree(cache, folder, symlinks=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    folder.chmod(0o700)
    return folder


def test_a_cache_of_another_user_is_refused_with_its_owner_and_works_as_that_user(run, strangers_cache):
    mount = ("-v", f"{strangers_cache}:{MOUNTED}:ro")
    code, out = run("vllm", "serve", MODEL, options=mount)
    assert code == 28, out
    assert f"Permission denied: {MOUNTED} belongs to uid {STRANGER}, group {STRANGER}, with mode 0700" in out
    assert f"docker run --user {STRANGER}:{STRANGER}" in out
    assert "fetch" not in out
    code, out = run("validate", MODEL, options=(*OFFLINE, *mount, "--user", f"{STRANGER}:{STRANGER}"))
    assert (code, "ok   model-files" in out) == (0, True), out


def test_a_snapshot_without_its_cache_and_a_missing_model_are_reported_with_the_mount(run, cache):
    snapshot = cache / "hub/models--openai--gpt-oss-120b/snapshots" / COMMIT
    code, out = run("serve", "/models/mine", options=("-v", f"{snapshot}:/models/mine:ro"))
    assert (code, "is a link to ../../blobs/" in out, "mount the whole cache" in out) == (28, True, True), out
    code, out = run("openai/gpt-oss-20b", "--max-model-len", "8192")
    assert (code, f"docker run -v ~/.cache/huggingface:{MOUNTED}:ro" in out) == (10, True), out


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("bash", "-c", "id -u; echo $VLLM_CACHE_ROOT | cut -d/ -f1-4"), "1000\n/var/cache/sparkforge\n"),
        (("python", "-c", "import sparkforge, validate; print('here')"), "here\n"),
        (("vllm", "--version"), "0.32.0"),
    ],
)
def test_other_programs_run_without_a_validation(run, arguments, printed):
    code, out = run(*arguments, options=OFFLINE)
    assert (code, printed in out, "validate ·" in out) == (0, True, False), out


@pytest.mark.parametrize("network", ["bridge", "host"])
def test_a_container_knows_whose_network_it_has(run, network):
    program = "from sparkforge.serve import access; print(access.has_host_network())"
    code, out = run("python", "-c", program, options=("--network", network))
    assert (code, out.strip()) == (0, str(network == "host" and access.has_host_network()))


def test_compose_does_not_make_a_folder_that_is_missing(project, tmp_path):
    project.env["HF_HOME"] = str(tmp_path / "none")
    try:
        out = project.compose("run", "--rm", "--no-deps", "vllm", "python", "-V", check=False)
    finally:
        del project.env["HF_HOME"]
    assert "Python" not in out
    assert not Path(tmp_path / "none").exists()
