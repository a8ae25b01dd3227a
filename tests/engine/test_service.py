"""`./inv service.install` on a real systemd, as process 1 of a container.

The launcher, the code that waits after a refused start (hold.py), and the supervisor are the real ones. The checkout is
mounted read-only, under a path that must be quoted, and a stand-in replaces vLLM. The test of the unit for Docker uses
no stand-in: the embedded image serves, on the Docker engine that these tests use.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from waiting import wait_for

from sparkforge.core.paths import ROOT

CHECKOUT = "/srv/spark forge 100% ä"
STATE = "/var/lib/state of ä"
MODEL = "/srv/models %h/tiny"
UNIT = "/etc/systemd/system/sparkforge.service"
SERVER = "^/usr/bin/python3 .*api_server"  # its command line; its supervisor's begins with another interpreter
BASE = os.environ.get("ENGINE_SYSTEMD_BASE") or "docker.io/sparkforge-ci/debian:bookworm-slim"
MAKE_STATE = """
from dataclasses import asdict
from pathlib import Path
from sparkforge import environments, pins
from sparkforge.core import manifest
from sparkforge.core.files import write_json
from sparkforge.environments import Environment
env = Environment("embedded")
env.python.parent.mkdir(parents=True)
env.python.write_text("#!/usr/bin/python3\\n" + Path("tests/engine/stand_in_python.py").read_text())
env.python.chmod(0o755)
made = manifest.Manifest(environments.STAGE, environments.inputs(env, pins.load()), {}, {}, {}, 0)
write_json(manifest.beside(env.path), asdict(made))
"""


class Machine:
    """A container whose process 1 is systemd, and methods that run our commands in it."""

    def __init__(self, engine, name, checkout=CHECKOUT, state=STATE, variables=()):
        self.engine, self.name, self.checkout = engine, name, checkout
        self.variables = (f"SPARKFORGE_STATE={state}", "XDG_RUNTIME_DIR=/run/user/0", *variables)

    def run(self, *arguments, check=True):
        variables = [word for pair in self.variables for word in ("-e", pair)]
        return self.engine.docker(
            "exec", *variables, "-w", self.checkout, self.name, *arguments, check=check, both=True
        )

    def sh(self, line, check=True):
        return self.run("sh", "-c", line, check=check)

    def inv(self, *arguments, code=0):
        output = self.sh(f'"{self.checkout}/inv" {" ".join(arguments)} 2>&1; echo "code $?"')
        assert output.rstrip().endswith(f"code {code}"), output
        return output

    def show(self, key, user=False):
        return self.sh(f"systemctl {'--user' if user else ''} show -p {key} --value sparkforge.service").strip()

    def count(self, program):
        return len(self.sh(f"cat /var/lib/stand-in/{program} 2> /dev/null", check=False).split())

    def until(self, key, value, seconds=180, user=False):
        def seen():
            try:
                return self.show(key, user)
            except AssertionError as error:  # the engine or systemd is just starting
                return str(error)

        def why():
            journal = self.sh(
                "journalctl --no-pager -n 60; systemctl status --no-pager sparkforge.service", check=False
            )
            return f"{key} is {seen()!r} and not {value!r}\n{journal}"

        wait_for(lambda: seen().startswith(value), seconds, why, pause=0.5)

    def power_cycle(self):
        self.engine.docker("restart", "-t", "20", self.name)

    def units(self):
        return self.sh("find /etc/systemd /root/.config 2> /dev/null | sort", check=False)


@pytest.fixture(scope="module")
def image(engine):
    tag = "sparkforge-test/systemd"
    build = ("build", "--network", "host", "--build-arg", f"BASE={BASE}", "-t", tag)
    engine.docker(*build, "-f", ROOT / "tests/engine/systemd.Dockerfile", ROOT / "tests/engine")
    yield tag
    engine.docker("rmi", tag, check=False)


def boot(engine, image, name, mounts, *options):
    """Start a container whose process 1 is systemd.

    The base interpreter of the checkout's .venv and `mounts` are mounted read-only.
    """
    ask = [ROOT / ".venv/bin/python", "-c", "import sys; print(sys.base_prefix)"]
    base = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    mounts = {**mounts, **({base: base} if base != "/usr" else {})}
    binds = [word for source, target in mounts.items() for word in ("-v", f"{source}:{target}:ro")]
    places = ["--tmpfs", "/run", "--tmpfs", "/run/lock"]
    options = (*options, "--privileged", "--cgroupns=private", *places, *binds)
    engine.docker("run", "-d", "--name", name, *options, image)


@pytest.fixture
def machine(engine, image):
    name = f"sparkforge-service-{os.getpid()}"
    boot(engine, image, name, {ROOT: CHECKOUT})
    booted = Machine(engine, name)
    booted.sh(f"mkdir -p /var/lib/stand-in '{MODEL}' '{STATE}' && chmod 700 '{STATE}'")
    booted.sh("cp tests/fake_api.py /var/lib/stand-in")
    booted.sh(f"""echo '{{"model_type": "gpt_oss"}}' > '{MODEL}/config.json'""")
    booted.run("env", "PYTHONDONTWRITEBYTECODE=1", ".venv/bin/python", "-c", MAKE_STATE)
    yield booted
    engine.docker("rm", "-f", "-v", name, check=False)


INSTALL = ("service.install", "--system", "--device", "embedded", "--port", "18123", "--model", f"'{MODEL}'")


def test_a_boot_starts_the_server_and_nothing_is_left_of_a_removed_one(machine):
    before = machine.units()
    machine.inv(*INSTALL)
    assert machine.run("systemd-analyze", "verify", UNIT) == ""
    again = machine.inv(*INSTALL)
    assert "unchanged" in again
    assert machine.show("ActiveState") == "inactive", "install alone starts nothing"

    machine.power_cycle()
    machine.until("ActiveState", "active")
    assert "first answers" in machine.show("StatusText")
    assert "tiny at http://127.0.0.1:18123/v1" in machine.inv("status")

    machine.inv("down")
    machine.until("ActiveState", "inactive")
    assert machine.show("NRestarts") == "0", "a server that was asked to end is not started again"
    machine.sh(f"mkdir -p {UNIT}.d && printf '[Service]\\nNice=5\\n' > {UNIT}.d/mine.conf")
    assert f"{UNIT}.d stays" in machine.inv("service.remove", "--system")
    machine.sh(f"rm -r {UNIT}.d")
    assert (machine.units(), machine.show("LoadState")) == (before, "not-found")


def test_a_killed_server_comes_back_and_one_that_always_dies_stays_stopped(machine):
    machine.inv(*INSTALL, "--now")
    machine.until("ActiveState", "active")
    machine.sh(f"mkdir -p {UNIT}.d && printf '[Service]\\nRestartSec=1\\nRestartSteps=0\\n' > {UNIT}.d/fast.conf")
    machine.sh("systemctl daemon-reload")

    machine.sh(f"kill -9 $(pgrep -f '{SERVER}')")
    machine.until("NRestarts", "1")
    machine.until("ActiveState", "active")
    machine.sh("kill -9 $(systemctl show -p MainPID --value sparkforge.service)")  # `./inv up` itself
    machine.until("NRestarts", "2")
    machine.until("ActiveState", "active")
    assert machine.sh(f"pgrep -fc '{SERVER}'").strip() == "1", "the killed launcher's server is gone"

    machine.sh("touch /var/lib/stand-in/die; systemctl reset-failed; systemctl restart --no-block sparkforge.service")
    machine.until("ActiveState", "failed", seconds=900)
    starts = machine.count("starts")
    assert machine.show("ExecMainStatus") == "24"
    time.sleep(5)
    assert machine.count("starts") == starts, "it stays stopped"
    assert machine.show("NRestarts") == "6"


def test_a_refused_start_waits_instead_of_looping_and_starts_once_the_model_has_changed(machine):
    machine.sh("touch /var/lib/stand-in/refuse")
    machine.inv(*INSTALL, "--now")
    machine.until("StatusText", "refused")
    first, pid = machine.count("validations"), machine.show("MainPID")
    time.sleep(15)
    assert machine.count("validations") <= first + 1
    assert (machine.show("MainPID"), machine.show("NRestarts")) == (pid, "0")

    machine.sh(f"rm /var/lib/stand-in/refuse; touch '{MODEL}/new.safetensors'")
    machine.until("ActiveState", "active", seconds=60)
    assert machine.show("MainPID") == pid
    assert machine.count("starts") == 1


def test_a_users_own_unit_starts_at_boot_if_the_user_lingers(machine):
    own = tuple(word for word in INSTALL if word != "--system")
    machine.sh("systemctl start user@0.service")
    assert "enable-linger root" in machine.inv(*own)
    machine.sh("loginctl enable-linger root")
    machine.power_cycle()
    machine.until("ActiveState", "active", user=True)
    machine.inv("service.remove")
    assert "sparkforge" not in machine.units()


class Login:
    """A user of the machine who logs in and out, to test what logind does to the user's shared memory."""

    NAME, HOME, CONTROL = "alice", "/home/alice", "/dev/shm/of-no-session"

    def __init__(self, machine):
        self.machine = machine
        machine.sh(f"useradd --create-home --uid 1000 {self.NAME} && chmod 755 /root")  # /root has the interpreter
        machine.sh(f"chown -R {self.NAME} /var/lib/stand-in '{STATE}'; touch /var/lib/stand-in/share")
        settings = "/etc/systemd/logind.conf.d"
        machine.sh(f"mkdir -p {settings} && printf '[Login]\\nUserStopDelaySec=0\\n' > {settings}/at-once.conf")
        machine.sh("systemctl restart systemd-logind")
        asked = "busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
        assert machine.sh(f"{asked} RemoveIPC") == "b true\n", "it is the default"

    def command(self, line):
        """Run a line as the user without a session."""
        own = f"HOME={self.HOME} XDG_RUNTIME_DIR=/run/user/1000 SPARKFORGE_GUARD_GIB=0"
        return self.machine.sh(f"runuser -u {self.NAME} -- env {own} sh -c '{line}' 2>&1", check=False)

    def log_in_and_out(self):
        """Log in and out; return whether the user's shared memory still exists."""
        self.command(f"echo x > {self.CONTROL}")
        assert self.NAME in self.machine.sh(f"su -l {self.NAME} -c loginctl")
        wait_for(lambda: f" {self.NAME} " not in self.machine.sh("loginctl list-sessions"), 60, pause=0.2)
        time.sleep(3)  # the user's manager ends after the session; then logind removes the memory
        return self.CONTROL in self.machine.sh("find /dev/shm -type f")


SYSTEM_UNIT = (*INSTALL, "--user", Login.NAME, "--now")


def test_a_logout_does_not_reach_the_shared_memory_of_a_system_unit(machine):
    """logind deletes the user's files in /dev/shm; without our line in the unit the server ends and restarts."""
    alice = Login(machine)
    installed = machine.sh(f"""SPARKFORGE_GUARD_GIB=0 '{CHECKOUT}/inv' {" ".join(SYSTEM_UNIT)} 2>&1""")
    assert "RemoveIPC" not in installed
    machine.until("ActiveState", "active")
    assert not alice.log_in_and_out(), "otherwise the test proves nothing: logind must delete the memory"
    time.sleep(1)
    assert (machine.show("ActiveState"), machine.show("NRestarts")) == ("active", "0")

    lines = "[Service]\\nTemporaryFileSystem=\\nRestartSec=1\\nRestartSteps=0\\n"
    machine.sh(f"mkdir -p {UNIT}.d && printf '{lines}' > {UNIT}.d/shared.conf && systemctl daemon-reload")
    machine.sh("systemctl restart --no-block sparkforge.service")
    machine.until("ActiveState", "active")
    assert not alice.log_in_and_out()
    machine.until("NRestarts", "1")
    machine.until("ActiveState", "active")
    doctor = alice.command(f'cd "{CHECKOUT}" && ./inv doctor --log "{STATE}/logs/server.previous.log"')
    assert "[shared-memory-deleted]" in doctor, doctor


def test_units_edited_by_hand_or_of_another_checkout_are_kept(machine):
    machine.inv(*INSTALL)
    machine.sh(f"echo '# mine' >> {UNIT}")
    for command in (("service.remove", "--system"), INSTALL):
        assert "drop-in" in machine.inv(*command, code=28)
    assert machine.sh(f"tail -n 1 {UNIT}") == "# mine\n"


@pytest.fixture
def docker_machine(engine, project, image):
    """A machine whose `docker` talks to the engine of these tests; so it has the host's paths and network."""
    docker = shutil.which("docker", path=engine.environment["PATH"])
    config = Path(engine.environment["DOCKER_CONFIG"])
    plugins = {plugin.resolve().parent for plugin in (config / "cli-plugins").iterdir()}
    socket = engine.environment["DOCKER_HOST"].removeprefix("unix://")
    mounts = {path: path for path in (ROOT, config, socket, *plugins)}
    name, compose = f"sparkforge-boot-{os.getpid()}", f"sparkforge-boot-{os.getpid()}"
    boot(engine, image, name, {**mounts, docker: "/usr/bin/docker"}, "--network", "host")
    variables = (f"DOCKER_HOST=unix://{socket}", f"DOCKER_CONFIG={config}", f"COMPOSE_PROJECT_NAME={compose}")
    yield Machine(engine, name, ROOT, "/var/lib/sparkforge", variables)
    engine.docker("rm", "-f", "-v", name, check=False)
    engine.docker("compose", "-p", compose, "down", "--volumes", check=False)


def test_figures_of_a_boot_that_starts_the_container(docker_machine, figures, first_token, free_port):
    machine, port, restarts = docker_machine, free_port(), f"{UNIT}.d"
    containers = ("ps", "--quiet", "--filter", f"label=com.docker.compose.project={machine.name}")

    def running():
        return machine.engine.docker(*containers).split()

    machine.inv("service.install", "--system", "--device", "docker-cpu", "--port", str(port), "--", "--max-num-seqs=3")
    assert machine.run("systemd-analyze", "verify", UNIT) == ""
    for _ in range(figures.repeats):
        machine.engine.docker("kill", machine.name, *running())  # the power goes
        with figures.measured("power-on to the first token"):
            machine.engine.docker("start", machine.name)
            assert first_token(port, "tiny-gpt-oss")
        machine.until("ActiveState", "active")
    (container,) = running()
    assert "--max-num-seqs=3" in machine.engine.docker("inspect", container)

    machine.sh(f"mkdir -p {restarts} && printf '[Service]\\nRestartSec=1\\nRestartSteps=0\\n' > {restarts}/fast.conf")
    machine.sh("systemctl daemon-reload; kill -9 $(systemctl show -p MainPID --value sparkforge.service)")
    machine.until("NRestarts", "1")
    assert container not in running(), "a killed `./inv up` must not leave its container"
    machine.until("ActiveState", "active", seconds=900)
    assert len(running()) == 1

    machine.inv("down")
    machine.until("ActiveState", "inactive")
    assert running() == []
    machine.inv("service.remove", "--system")
