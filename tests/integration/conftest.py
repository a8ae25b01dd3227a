"""Shared fixtures: the complete start from a fresh copy, vLLM as shipped by upstream and patched, a tiny checkpoint."""

import dataclasses
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import scripted
import tiny_random
from programs import require

from sparkforge import pins
from sparkforge.core.files import write_atomic
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import session_members, started_at
from sparkforge.image.devices import EMBEDDED
from sparkforge.models import tiny
from sparkforge.patching.series import Queue
from sparkforge.pins.wheels import TargetMachine, choose_pinned
from sparkforge.serve import command_line, launch
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan
from sparkforge.sources import archive, fetch, trees

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".sparkforge", ".*_cache", "__pycache__", "*.egg-info", ".hypothesis"
)
HERE = Path(__file__).parent
STORED_RESPONSES = 3  # that the scripted server keeps
KEY = "sesame-2f9c"  # of the scripted server
COMPILER = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|cpp|c89|c99|clang|clang\+\+|ld|as)([-.].*)?")


@dataclass
class Checkout:
    """A fresh copy of the checkout, its server's port, and a folder of all programs except compilers."""

    path: Path
    port: int
    programs: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self):
        return self.path / ".sparkforge"

    @property
    def environment(self):
        ours = ("SPARKFORGE_STATE", "PYTHONPATH", "OMP_NUM_THREADS")  # set for pytest (lab/suite.py), not by a user
        return {**{key: value for key, value in os.environ.items() if key not in ours}, "PATH": str(self.programs)}

    def inv(self, *args):
        command = ["./inv", *args]
        return subprocess.run(command, cwd=self.path, env=self.environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session", autouse=True)
def vllm_cache(tmp_path_factory):
    """A shared cache folder for vLLM's facts about a model's class, which a process must import vLLM to find.

    `./inv up` has its own folder, as for a user.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # the workers share the parent folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(base / "vllm"))
        yield


@pytest.fixture(scope="session")
def nvcc():
    return require("nvcc")


@pytest.fixture(scope="session")
def forking():
    """Return a function: a Launch → the same server, whose processes are forks of a process that has imported vLLM.

    Such a server starts in a third of the time. Use it to test a server's answers, not how vLLM starts its processes.
    """

    def forking(launch):
        python, _module, *arguments = launch.command
        arguments = arguments[arguments[0] == command_line.FORKED :]
        environment = {**launch.environment, "VLLM_CACHE_ROOT": os.environ["VLLM_CACHE_ROOT"]}
        command = (python, "-m", command_line.FORKED, *arguments)
        return dataclasses.replace(launch, command=command, environment=environment)

    return forking


@pytest.fixture(scope="session")
def fresh(large_folder, free_port):
    """Return a checkout in a folder with a space and a letter beyond ASCII, on a machine without a compiler."""
    with large_folder("fresh") as parent:
        path, programs = parent / "check out ä", parent / "programs"
        shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)
        programs.mkdir()
        for folder in os.environ["PATH"].split(os.pathsep):
            for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
                if not COMPILER.fullmatch(program.name) and not (programs / program.name).is_symlink():
                    (programs / program.name).symlink_to(program)
        checkout = Checkout(path, free_port(), programs)
        yield checkout
        checkout.inv("down")


@pytest.fixture(scope="session")
def killed_once(fresh):
    """Kill a first `./inv up` while it installs the environment; later starts must not trust its files."""
    command = ["./inv", "up", "--port", str(fresh.port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command, cwd=fresh.path, env=fresh.environment, start_new_session=True, **quiet)
    environments = fresh.state / "envs"
    while first.poll() is None and len(list(environments.glob(".embedded.*/lib/python*/site-packages/*"))) < 20:
        time.sleep(0.02)
    assert first.poll() is None, "it ended before it could be killed"
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (environments / "embedded").exists()
    return fresh


@pytest.fixture(scope="session")
def up(killed_once):
    """Run `./inv up` and return the checkout; the only line on stdout is the API's URL."""
    fresh = killed_once
    result = fresh.inv("up", "--port", str(fresh.port))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{fresh.url}/v1\n"
    fresh.stderr = result.stderr
    return fresh


@pytest.fixture(scope="session")
def validation(up):
    return json.loads((up.state / "validation.json").read_text())


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """The tiny checkpoint with random weights, which tests must not change."""
    return tiny.write_tiny(tmp_path_factory.mktemp("models") / "tiny", tiny_random.RANDOM)


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def scripted_server(request, tmp_path_factory, free_port, forking):
    """Serve the scripts of all collected files, SCRIPTS (cue → text), by one vLLM with an API key and a profiler.

    Its application writes its routes into a file (list_routes.py).
    """
    modules = {item.module for item in request.session.items if "scripted_server" in item.fixturenames}
    scripts = {cue: text for module in modules for cue, text in module.SCRIPTS.items()}
    assert len(scripts) == sum(len(module.SCRIPTS) for module in modules), "two files have one cue"
    work, model = tmp_path_factory.mktemp("scripted"), "scripted"
    weights = scripted.weights([scripted.Script(cue, text) for cue, text in sorted(scripts.items())])
    (work / "state").mkdir(mode=0o755)
    (work / "key").write_text(f"{KEY}\n")
    (work / "key").chmod(0o600)
    plan = StartPlan(
        EMBEDDED, model_id=model, port=free_port(), key_file=str(work / "key"), hosts=("spark.example",), profiled=True
    )
    settings = {
        "SPARKFORGE_STATE": str(work / "state"), "ROUTES_FILE": str(work / "routes.json"),
        "VLLM_RESPONSES_API_STORE_MAX_ENTRIES": str(STORED_RESPONSES),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("SPARKFORGE_TEST_TREE")))),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        folder = tiny.write_tiny(work / "model", weights)
        described = in_environment.Embedded(plan, Path(sys.executable), folder).launch()
        command = (*described.command, "--middleware", "list_routes.ListRoutes")
        server = launch.begin(forking(dataclasses.replace(described, command=command)))
    try:
        serving = Endpoint(server.url, model, key=KEY).wait_until_serving(time.monotonic() + 600, lambda: server.alive)
        assert serving, Path(server.log).read_text(errors="replace")[-3000:]
        facts = {"url": server.url, "model": model, "key": KEY, "server": server, "work": work}
        yield SimpleNamespace(**facts, stored_responses=STORED_RESPONSES)
    finally:
        members = session_members(server.pid)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARKFORGE_STATE", settings["SPARKFORGE_STATE"])
            launch.stop()
        assert [pid for pid in members if started_at(pid) is not None] == []


@dataclass
class Forks:
    process: subprocess.Popen
    log: Path

    def run(self, program, arguments=(), stdin="", codes=(0,), **environment):
        request = {"program": str(program), "arguments": list(map(str, arguments)), "stdin": stdin}
        self.process.stdin.write(json.dumps({**request, "environment": environment}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text(errors="replace")[-3000:]
        answer = json.loads(line)
        assert answer["code"] in codes, answer["output"]
        return answer["output"]

    def answer(self, text, *arguments):
        """Run a program, given as text, and return the JSON of the last line that it prints."""
        program = self.log.with_name("program.py")
        program.write_text(text)
        return json.loads(self.run(program, arguments).splitlines()[-1])


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Return a context manager for `Forks`, from the modules to import, the whole environment, and the folder."""

    @contextmanager
    def forks(imports, env, cwd=None):
        log, pipe = tmp_path_factory.mktemp("forks") / "log", subprocess.PIPE
        command = [sys.executable, "-P", ROOT / "tests/integration/forked.py", *imports]
        streams = {"stdin": pipe, "stdout": pipe, "text": True}
        with log.open("wb") as errors:
            process = subprocess.Popen(command, env=env, cwd=cwd or log.parent, stderr=errors, **streams)
        with process:  # it ends when its stdin is closed
            yield Forks(process, log)

    return forks


@pytest.fixture(scope="session")
def vllm_process(forks):
    """Return a function: a folder with vLLM → a process that has imported most of vLLM and runs programs in its forks.

    It imports only modules that all programs share and none replaces before its own import, such as the CPU platform.
    """
    imports = ["torch._inductor", "vllm.compilation.decorators", "vllm.config", "vllm.forward_context"]
    with ExitStack() as stack:

        @functools.cache
        def process(tree):
            settings = {
                "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "",
                "VLLM_CACHE_ROOT": str(tree / "cache"), "VLLM_DISABLE_COMPILE_CACHE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }  # fmt: skip
            return stack.enter_context(forks(imports, {**os.environ, **settings}))

        yield process


@pytest.fixture(scope="session")
def installed_vllm(large_folder):
    """Return a function that copies the installed vLLM to a new folder, with its bytecode (compiling takes 6 s)."""
    installed = Path(importlib.util.find_spec("vllm").origin).parent
    with ExitStack() as stack:

        def copy(name):
            tree = stack.enter_context(large_folder(name))
            shutil.copytree(installed, tree / "vllm", copy_function=link_or_copy)
            return tree

        yield copy


@pytest.fixture(scope="session")
def vllm_trees(installed_vllm):
    """Copies of the installed vLLM: `patched`, as in our wheel, and `upstream`, as in upstream's wheel."""
    copies = SimpleNamespace(upstream=installed_vllm("upstream"), patched=installed_vllm("patched"))
    component = pins.load().component("embedded", "vllm")
    queue = Queue.load(ROOT / "patches" / component.patches)
    wheel = fetch.fetch_pinned(component, choose_pinned(component, TargetMachine(platform.machine())).filename)
    for path, content in archive.read_files(wheel, None, set(queue.paths)).items():
        if content is None:  # the queue creates it
            (copies.upstream / path).unlink()
        else:
            write_atomic(copies.upstream / path, content)  # a rename, so that the installed file keeps its bytes
        for compiled in (copies.upstream / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
            compiled.unlink()
    return copies


@pytest.fixture(scope="session")
def next_trees(large_folder):
    """vLLM's Python of the stack spark-next, from its source archive: `upstream`, and `patched` by its queue.

    This release has no CPU build. Its Python runs on the test environment's torch with VLLM_TARGET_DEVICE=cpu,
    upstream's own way to select the CPU platform without compiled extensions.
    """
    component = pins.load().component("spark-next", "vllm")
    (filename,) = component.files
    trees.unpack_archive(component, filename)
    source, queue = trees.tree_folder(component, filename), Queue.load(ROOT / "patches" / component.patches)
    with large_folder("upstream") as pristine, large_folder("patched") as patched:
        for tree in (pristine, patched):
            for name in ("vllm", "vllm.egg-info"):
                shutil.copytree(source / name, tree / name, copy_function=link_or_copy)
        files = {path: patched / path for path in queue.paths}
        before = {path: file.read_bytes() if file.exists() else None for path, file in files.items()}
        for path, content in queue.apply(before).items():
            files[path].unlink(missing_ok=True)  # a hard link
            files[path].write_bytes(content)
        yield SimpleNamespace(upstream=pristine, patched=patched)


@pytest.fixture(
    scope="session",
    params=[("vllm_trees", "spark"), pytest.param(("next_trees", "spark-next"), marks=pytest.mark.nightly)],
    ids=lambda param: param[1],
)
def release(request):
    """A stack for a Spark, and its vLLM as in upstream's archive (`upstream`) and with our queue (`patched`)."""
    trees, stack = request.param
    return SimpleNamespace(stack=stack, **vars(request.getfixturevalue(trees)))
