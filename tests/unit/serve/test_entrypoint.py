"""The container's program, run as a container runs it: real validator, real exec, real signals.

`Container.decides` runs the same `main` in this process to test its decisions before it becomes the server.

`site` replaces the image's site-packages: metadata of a patched vLLM with our plugin, and instead of the API server a
small program that records its arguments and environment. For everything else the validator checks this machine.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_for

from lab.patches.lock import write_patched
from sparkforge.core.errors import ServerError
from sparkforge.core.paths import ROOT
from sparkforge.models import recipes
from sparkforge.plan.architecture import parse
from sparkforge.serve import access, entrypoint, restarts, settings
from sparkforge.serve import health as healthy
from sparkforge.serve.cluster import watch
from sparkforge.serve.command_line import ServerCommand

SERVER = textwrap.dedent("""
    import http.server, json, os, signal, sys, threading
    argv = sys.argv[1:]
    port = int(argv[len(argv) - argv[::-1].index("--port")])

    class Api(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/engine-dies":  # vLLM's API server ends with success then
                os._exit(0)
            self.send_response(200)
            self.end_headers()
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Api)
    def drain(*_):
        print("drained", flush=True)
        os._exit(7)
    signal.signal(signal.SIGTERM, drain)
    state = {"pid": os.getpid(), "argv": argv, "env": dict(os.environ)}
    open(os.environ["TOLD"] + ".tmp", "w").write(json.dumps(state))
    os.rename(os.environ["TOLD"] + ".tmp", os.environ["TOLD"])
    server.serve_forever()
""")


@pytest.fixture(scope="module")
def site(tmp_path_factory, patched_wheel):
    """A folder before site-packages on the path: a stand-in server as patched vLLM, our plugin, torch's metadata.

    `root` in the same folder is as in the image: pins.toml, the lock with this vLLM's wheel, and its queue.
    """
    folder = tmp_path_factory.mktemp("image")
    names = ("VLLM_NO_USAGE_STATS", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY", "VLLM_CACHE_ROOT")
    server = "vllm/entrypoints/openai/api_server.py"
    files = {server: SERVER, "vllm/envs.py": f"environment_variables = {dict.fromkeys(names)!r}"}
    files |= dict.fromkeys(("vllm/entrypoints/__init__.py", "vllm/entrypoints/openai/__init__.py"), "")
    wheel = patched_wheel.make(folder, {name: text.encode() for name, text in files.items()})
    site = wheel.install(folder / "environment", wheel.path)
    root = folder / "root"
    (root / "locks").mkdir(parents=True)
    write_patched(wheel.lock, root / "locks/patched.toml")
    (root / "pins.toml").symlink_to(ROOT / "pins.toml")
    (root / "patches").symlink_to(wheel.queue.parent)
    for name, version in (("torch", "2.13.0+cpu"), ("sparkforge", "0.1.0")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "[vllm.general_plugins]\nspark_mxfp4 = spark_mxfp4.vllm.plugin:register\n"
    (site / "sparkforge-0.1.0.dist-info" / "entry_points.txt").write_text(points)
    return site


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "my-gpt-oss"
    folder.mkdir()
    small = {"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = {**recipes.load()["tiny-gpt-oss"].config, **small}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    size = parse(config, "config.json").weight_bytes()
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return folder


def until(child, condition):
    wait_for(lambda: child.poll() is not None or condition())
    assert child.poll() is None, child.communicate()[0]


class Container:
    """Starts the entrypoint with a container's variables, and ends its processes."""

    def __init__(self, site, folder, model, port):
        self.run, self.server_file, self.port = folder / "run", folder / "told.json", port
        steering = ("VLLM_", "HF_", "SPARKFORGE_", "PYTHONOPTIMIZE")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
        self.environ = {
            **kept, "PYTHONPATH": f"{site}:{ROOT}", "SPARKFORGE_ROOT": str(site.parents[3] / "root"),
            "SPARKFORGE_STACK": "embedded", "OMP_NUM_THREADS": "1", "SPARKFORGE_PROFILE": "embedded",
            "SPARKFORGE_MODEL": str(model), "SPARKFORGE_RUN": str(self.run), "SPARKFORGE_STATE": str(folder / "state"),
            "VLLM_CACHE_ROOT": str(folder), "TOLD": str(self.server_file),
        }  # fmt: skip
        self.started = []

    def start(self, *arguments, **variables):
        child = subprocess.Popen(
            [sys.executable, "-m", "sparkforge.serve.entrypoint", "--port", str(self.port), *arguments], cwd=ROOT,
            env={**self.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(child)
        return child

    def ends(self, *arguments, **variables):
        child = self.start(*arguments, **variables)
        out, _ = child.communicate(timeout=120)
        assert "Traceback" not in out
        return child.returncode, out

    def decides(self, *arguments, **variables):
        """Run `main` in this process until it would become the server, without a validation.

        Returns its exit code (None for a server), what it printed, and the server's command and environment.
        """
        printed, servers = io.StringIO(), []
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(printed), redirect_stdout(printed):
            patch.setattr(os, "environ", {**self.environ, "SPARKFORGE_VALIDATE": "off", **variables})
            patch.setattr(signal, "signal", lambda *_args: None)
            patch.setattr(entrypoint, "become", servers.append)
            code = entrypoint.main(["--port", str(self.port), *arguments])
        server = servers[0] if servers else None
        return code, printed.getvalue(), server

    def serves(self, *arguments, **variables):
        code, printed, server = self.decides(*arguments, **variables)
        assert code is None, printed
        return list(server.arguments), server.environment

    def serving(self, child):
        until(child, self.server_file.exists)
        return json.loads(self.server_file.read_text())

    def healthy(self):
        command = [sys.executable, "-m", "sparkforge.serve.health"]
        return subprocess.run(command, cwd=ROOT, env=self.environ, capture_output=True, text=True, check=False)

    def metric(self, name, **labels):
        families = text_string_to_metric_families((self.run / "sparkforge_validation.prom").read_text())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        (value,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return value


@pytest.fixture
def container(site, tmp_path, model, free_port):
    container = Container(site, tmp_path, model, free_port())
    yield container
    for child in container.started:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdout.close()


def test_a_green_machine_gets_a_server_that_owns_the_process(container):
    pytest.importorskip("torch")  # ./inv test --fast does not install it
    container.run.mkdir()
    for stale in ("ready", "validation.json", "sparkforge_validation.prom"):
        (container.run / stale).write_text("from the start before")
    assert "cannot read" in container.healthy().stdout
    child = container.start()
    serving = container.serving(child)
    assert psutil.Process(serving["pid"]).ppid() == child.pid  # by exec, the supervisor is the container's own program
    assert serving["argv"][:2] == ["--model", container.environ["SPARKFORGE_MODEL"]]
    host = "127.0.0.1" if access.has_host_network() else "0.0.0.0"  # noqa: S104 - compared with
    assert f"--served-model-name my-gpt-oss --host {host}" in " ".join(serving["argv"])
    assert "--quantization=spark-mxfp4" in serving["argv"]
    assert f" --port {container.port} --middleware" in " ".join(serving["argv"])  # after the profile's own flags
    assert (serving["env"]["VLLM_CPU_KVCACHE_SPACE"], serving["env"]["HF_HUB_OFFLINE"]) == ("1", "1")
    assert json.loads((container.run / "validation.json").read_text())["verdict"] == "serve"
    assert container.metric("sparkforge_validation_verdict", verdict="serve") == 1
    assert container.metric("sparkforge_validation_check", check="model-files", status="pass", required="true") == 1
    assert container.metric("sparkforge_build_info", profile="embedded", vllm="0.32.0+sparkforge.1", mode="strict") == 1
    assert container.metric("sparkforge_validation_timestamp_seconds") > time.time() - 600
    health = container.healthy()
    assert (health.returncode, health.stdout) == (0, "healthy\n")
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 143  # a requested end, not the server's 0
    assert "ok   model-files" in out
    assert out.endswith("drained\n")
    assert container.healthy().returncode == 1


@pytest.mark.slow
def test_a_refused_machine_gets_no_server_and_code_30(container, model):
    (model / "tokenizer.json").unlink()
    container.run.mkdir()
    (container.run / "ready").write_text("{}")
    code, out = container.ends()
    assert code == 30
    assert "FAIL model-files" in out
    assert re.search(r"next: ./inv pull .*on the host", out)  # the image has no ./inv
    assert not (container.run / "ready").exists()
    assert not container.server_file.exists()
    assert json.loads((container.run / "validation.json").read_text())["exit_code"] == 30
    assert container.metric("sparkforge_validation_verdict", verdict="refuse") == 1
    assert container.metric("sparkforge_validation_check", check="model-files", status="fail") == 1
    assert "the validation has not passed" in container.healthy().stdout


@pytest.mark.slow
def test_a_held_container_stays_and_says_so(container, model):
    (model / "tokenizer.json").unlink()
    child = container.start(SPARKFORGE_REFUSED="hold")
    until(child, lambda: "refused: " in (said := healthy.look(container.run)) and "model-files" in said)


def test_warn_serves_what_was_refused_and_says_so(container, model):
    pytest.importorskip("torch")  # ./inv test --fast does not install it
    (model / "tokenizer.json").unlink()
    child = container.start(SPARKFORGE_VALIDATE="warn")
    container.serving(child)
    assert container.metric("sparkforge_validation_verdict", verdict="refuse") == 1
    assert container.metric("sparkforge_build_info", mode="warn") == 1
    assert json.loads((container.run / "ready").read_text())["validated"] == "warn"
    child.terminate()
    assert "WARNING: model-files: missing files" in child.communicate()[0]


def test_a_server_whose_engine_dies_is_a_failed_container(container):
    child = container.start(SPARKFORGE_VALIDATE="off")
    container.serving(child)
    with suppress(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{container.port}/engine-dies", trust_env=False)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == ServerError.exit_code  # what `on-failure` restarts
    assert "ended by itself" in out
    assert not (container.run / "validation.json").exists()
    assert "nothing was validated" in out
    assert "port-free" not in out


def test_secrets_reach_the_server_but_not_its_arguments_and_the_health_check_knows_the_key(
    container, tmp_path, monkeypatch
):
    (tmp_path / "key").write_text("sesame\n")
    assert container.serves(SPARKFORGE_BIND="192.168.1.7", SPARKFORGE_API_KEY_FILE=str(tmp_path / "key"))
    (tmp_path / "token").write_text("hf_x\n")
    files = {"SPARKFORGE_API_KEY_FILE": tmp_path / "key", "SPARKFORGE_HF_TOKEN_FILE": tmp_path / "token"}
    arguments = container.serving(container.start(SPARKFORGE_VALIDATE="off", **{k: str(v) for k, v in files.items()}))
    assert arguments["env"]["VLLM_API_KEY"] == "sesame"
    assert arguments["env"]["HF_TOKEN_PATH"] == str(tmp_path / "token")
    assert "sesame" not in " ".join(arguments["argv"])
    assert "--disable-fastapi-docs" in arguments["argv"]
    ready = container.run / "ready"
    assert ready.stat().st_mode & 0o777 == 0o600
    assert "sesame" not in ready.read_text()
    monkeypatch.setenv("SPARKFORGE_API_KEY_FILE", str(tmp_path / "key"))
    assert healthy.look(container.run) == ""
    (tmp_path / "key").write_text("open\n")
    assert "is not the one that the server started with" in healthy.look(container.run)
    (tmp_path / "key").write_text("")
    assert "it is empty" in healthy.look(container.run)


def test_the_guard_stands_before_every_server_and_a_folder_for_traces_adds_the_profiler(container, tmp_path):
    arguments, environment = container.serves(SPARKFORGE_ALLOWED_HOSTS="vllm,")
    assert arguments[-2:] == ["--middleware", "sparkforge.serve.access.Guard"]
    assert "--profiler-config" not in arguments
    assert environment["SPARKFORGE_ALLOWED_HOSTS"] == "localhost,127.0.0.1,[::1],vllm"
    assert not environment.get("VLLM_API_KEY")
    arguments, environment = container.serves(SPARKFORGE_PROFILER=str(tmp_path / "traces"))
    config = json.loads(arguments[arguments.index("--profiler-config") + 1])
    assert (config["profiler"], config["torch_profiler_dir"]) == ("torch", str(tmp_path / "traces"))
    assert environment["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] == "1"
    assert environment["SPARKFORGE_ALLOWED_HOSTS"] == ""  # all of them


def test_a_container_too_small_for_a_compiler_starts_none(container, monkeypatch):
    for gigabytes, own, off in ((7, {}, "1"), (20, {}, None), (7, {"FLASHINFER_DISABLE_JIT": ""}, "")):
        machine = entrypoint.memory.Machine(gigabytes * 10**9, 20, "/sys/fs/cgroup")
        monkeypatch.setattr(entrypoint.memory, "measure", lambda machine=machine: machine)
        assert container.serves(**own)[1].get("FLASHINFER_DISABLE_JIT") == off


def test_a_key_file_without_a_key_stops_the_start_and_an_empty_token_does_not(container, tmp_path):
    (tmp_path / "file").write_text("\n")
    code, out, server = container.decides(SPARKFORGE_API_KEY_FILE=str(tmp_path / "file"))
    assert (code, server, "it is empty" in out) == (28, None, True)
    assert "HF_TOKEN_PATH" not in container.serves(SPARKFORGE_HF_TOKEN_FILE=str(tmp_path / "file"))[1]
    code, out, server = container.decides(SPARKFORGE_HF_TOKEN_FILE=str(tmp_path / "none"))
    assert (code, server, "cannot read the Hugging Face token" in out) == (28, None, True)


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        ((), {"SPARKFORGE_VALIDATE": "stirct"}, 2, "stirct"),
        ((), {"SPARKFORGE_SERVE_PROFILE": "fast"}, 2, "fast"),  # on a CPU
        ((), {"SPARKFORGE_RUN": "/proc/none"}, 28, "cannot write into /proc/none"),
        (("--port", "many"), {}, 2, "'many' is not a port"),
        *(
            (words.split(), {}, 2, "--api-key may not be")
            for words in ("--api-key=sesame", "--api_key=x", "--api sesame")
        ),
        ((), {"VLLM_ARGS": "--api-key sesame"}, 2, "--api-key may not be an argument"),
        ((), {"SPARKFORGE_BIND": "192.168.1.7"}, 2, "192.168.1.7 would open the server without an API key"),
    ],
)
def test_invalid_settings_and_those_that_open_the_server_are_refused(container, arguments, variables, code, message):
    ended, out, server = container.decides(*arguments, **variables)
    assert (ended, server) == (code, None)
    assert message in out
    assert "sesame" not in out


def test_validate_ends_with_the_verdict_and_starts_nothing(container, model):
    """`docker compose run vllm validate` shares a running server's run folder, so it must keep the readiness file."""
    pytest.importorskip("torch")  # ./inv test --fast does not install it
    container.run.mkdir()
    (container.run / "ready").touch()
    command = [sys.executable, "-m", "sparkforge.serve.entrypoint", "validate", str(model)]
    environment = {**container.environ, "SPARKFORGE_MODEL": "/nowhere"}
    for code, line in ((0, "ok   model-files"), (30, "FAIL model-files")):
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert (result.returncode, line in result.stdout) == (code, True), result.stdout + result.stderr
        (model / "tokenizer.json").unlink(missing_ok=True)
    assert not container.server_file.exists()
    assert (container.run / "ready").exists()


@pytest.fixture
def hanging(site, tmp_path):
    """A torch that writes its process id and hangs when the validator's child imports it."""
    folder = tmp_path / "hanging"
    folder.mkdir()
    code = f"import os, time\nopen({str(folder / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (folder / "torch.py").write_text(code)
    paths = f"{folder}:{site}:{ROOT}"
    settings = {"PYTHONPATH": paths, "SPARKFORGE_PROFILE": "spark", "SPARKFORGE_SERVE_PROFILE": "embedded"}
    return SimpleNamespace(pid=folder / "pid", variables=settings)


@pytest.mark.slow
def test_a_validator_that_hangs_is_ended_with_its_probes_and_refuses(container, hanging, ended):
    code, out = container.ends(**hanging.variables, SPARKFORGE_VALIDATE_SECONDS="8")
    assert code == 30
    assert "FAIL validator  the validator did not end within 8 s" in out
    assert ended(int(hanging.pid.read_text()))
    assert json.loads((container.run / "validation.json").read_text())["verdict"] == "refuse"
    assert container.metric("sparkforge_validation_check", check="validator", status="fail") == 1


@pytest.mark.slow
def test_a_stop_while_validating_ends_the_probes_too(container, hanging, ended):
    child = container.start(**hanging.variables)
    until(child, lambda: hanging.pid.exists() and hanging.pid.read_text())
    probe = int(hanging.pid.read_text())
    child.terminate()
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 143
    assert "Traceback" not in out
    assert ended(probe)


def test_a_validator_that_dies_after_its_report_is_not_believed(tmp_path):
    report, text = str(tmp_path / "validation.json"), json.dumps({"verdict": "serve", "exit_code": 0})
    code = f"import os\nopen({report!r}, 'w').write({text!r})\nos.kill(os.getpid(), {int(signal.SIGSEGV)})\n"
    (tmp_path / "validate.py").write_text(code)
    arguments = settings.read({"SPARKFORGE_PROFILE": "embedded", "SPARKFORGE_RUN": str(tmp_path)})
    server = ServerCommand("m", "m", "127.0.0.1", 8000, extra_environment={"PYTHONPATH": str(tmp_path)})
    document = entrypoint.validate(arguments, server)
    assert document["verdict"] == "refuse"
    assert "was killed by signal 11, its report says 0" in document["findings"][0]["evidence"]


def test_a_worker_of_a_cluster_has_no_api_port(container):
    _, printed, server = container.decides(VLLM_ARGS="--node-rank=1 --headless")
    assert server.command("python")[1:4] == ("-m", "vllm.entrypoints.cli.main", "serve")
    assert json.loads((container.run / entrypoint.READY).read_text())["port"] == 0
    assert "worker starts" in printed


def test_a_node_of_a_cluster_ends_with_another_node(container, free_port):
    arguments = watch.options("head", "127.0.0.1", free_port(), ("worker",), listen=True)
    options = {entrypoint.CLUSTER: json.dumps(arguments), watch.TOKEN: "t0"}
    child = container.start(SPARKFORGE_VALIDATE="off", **options)
    assert container.serving(child)
    with socket.create_connection(("127.0.0.1", int(arguments[5])), timeout=20) as worker:
        for line in ({"hello": "worker", "token": "t0"}, {"node": "worker", "end": "its server ended with code 1"}):
            worker.sendall(json.dumps(line).encode() + b"\n")
        out, _ = child.communicate(timeout=60)
    assert child.returncode == watch.ENDED
    assert "node worker ended this node's part of the server" in out
    history = Path(container.environ["SPARKFORGE_STATE"]) / restarts.NAME
    assert not history.exists()  # cluster.up's keeper counts the failures of all nodes
