"""The systemd unit: quoted as systemd reads it, its mark, and what an installation refuses."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli.service import install
from sparkforge.core import paths
from sparkforge.core.errors import ServerError, SparkforgeError, StorageError, UsageError
from sparkforge.plan import thresholds
from sparkforge.serve import access, service, unit
from sparkforge.serve.service import Manager
from sparkforge.serve.unit import ServiceUnit

ODD = '/srv/a b 100% ä $HOME "q" \\x'


def written(**changes):
    values = {"arguments": ("--port=8000",), "user": "root", "container": False, "version": 257, **changes}
    return ServiceUnit(**values).text()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("container", [False, True])
def test_systemd_reads_the_unit_without_a_complaint(tmp_path, container):
    root = tmp_path / "a b 100% ä"
    root.mkdir()
    (root / "inv").write_text("#!/bin/sh\n")
    (root / "inv").chmod(0o755)
    number = int(
        subprocess.run(
            [shutil.which("systemctl"), "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[1]
    )
    text = written(root=root, container=container, version=number, environment={"A": 'b "c" %h'}, places=(root,))
    (tmp_path / "sparkforge.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "sparkforge.service"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    complaints = [line for line in result.stderr.splitlines() if "sparkforge.service" in line]
    assert not complaints


def test_words_are_escaped_and_no_variable_is_replaced():
    text = written(arguments=(f"--model={ODD}",), root=Path("/srv/100% x"))
    assert '"--model=/srv/a b 100%% ä $HOME \\"q\\" \\\\x"' in text
    assert 'ExecStart=:"/srv/100%% x/inv" "up" "--foreground" "--hold"' in text
    assert "WorkingDirectory=/srv/100%% x\n" in text


@pytest.mark.parametrize("path", ["/srv/a\nExecStart=x", "/srv/\udcff", "/srv/a\\"])
def test_a_path_that_no_unit_can_hold_is_refused(path):
    with pytest.raises(UsageError, match="cannot stand in a unit"):
        written(root=Path(path))


def test_pauses_grow_where_systemd_can(monkeypatch):
    assert "RestartMaxDelaySec=" in written(version=254)
    assert "RestartMaxDelaySec=" not in written(version=253)
    assert re.search(r"^RestartSec=\d+s$", written(version=252), re.MULTILINE)


def settings_of(text):
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def test_what_no_restart_cures_is_not_restarted():
    codes = {family.family: family.exit_code for family in SparkforgeError.__subclasses__()}
    lasting = {codes[name] for name in ("usage", "input", "integrity", "patch", "validation")}
    for container in (False, True):
        prevented = settings_of(written(container=container))["RestartPreventExitStatus"].split()
        assert {int(code) for code in prevented} == lasting


def test_the_embedded_server_has_the_limits_of_the_memory_guards_page_and_a_container_its_own():
    limits = {"OOMScoreAdjust": "500", "OOMPolicy": "continue", "MemoryMax": "90%", "MemorySwapMax": "0"}
    assert limits.items() <= settings_of(written()).items()
    assert not limits.keys() & settings_of(written(container=True)).keys()


def test_a_system_units_shared_memory_is_its_own_and_the_validator_knows():
    mounted, known = "TemporaryFileSystem=/dev/shm:mode=1777,size=50%\n", 'Environment="SPARKFORGE_OWN_SHM=1"\n'
    assert mounted in written()
    assert known in written()
    for other in ({"user": ""}, {"container": True}):  # a user's manager may not mount; a container has its own
        assert "/dev/shm" not in written(**other)
        assert "OWN_SHM" not in written(**other)


@pytest.mark.parametrize("lingers", [False, True])
def test_a_users_own_unit_says_what_a_logout_does_unless_the_user_lingers(monkeypatch, capsys, lingers):
    monkeypatch.setattr(service, "_lingers", lambda _user: lingers)
    service._hint_lingering("alice")
    hint = capsys.readouterr().err
    assert ("sudo loginctl enable-linger alice" in hint) is not lingers
    assert ("RemoveIPC" in hint) is not lingers


@pytest.mark.parametrize("container", [False, True])
def test_nothing_in_the_service_gets_new_privileges(container):
    hardened = {"NoNewPrivileges", "LockPersonality", "RestrictRealtime", "RestrictSUIDSGID"}
    settings = settings_of(written(container=container))
    assert {settings.get(name) for name in hardened} == {"yes"}


def test_every_variable_of_the_served_container_is_carried_or_left_out_for_a_reason():
    compose = (paths.ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    vllm = compose[compose.index("\n  vllm:") : compose.index("\n  prometheus:")]
    stacks = (paths.ROOT / "deploy/stacks.yml").read_text(encoding="utf-8")
    names = set(re.findall(r"\$\{([A-Z_]+)", vllm + stacks[stacks.index("\nservices:") :]))
    names |= set(re.findall(r"^ +(SPARKFORGE_[A-Z_]+):$", vllm, re.MULTILINE))
    left_out = {
        "PORT",  # --port
        "SPARKFORGE_API_KEY",  # --api-key-file
        "SPARKFORGE_RESTART",  # the unit sets both
        "SPARKFORGE_REFUSED",
        "SPARKFORGE_VALIDATE",  # see unit.toml
        "SPARKFORGE_PROFILER",  # for development
        "SPARKFORGE_REVISION",  # of a build
        "COMPOSE_FILE",  # `up` names the files
        *("BENCH_TOKENIZER", "ISL", "OSL", "CONC", "NUM_PROMPTS"),  # of the bench services
    }
    assert unit.carried(dict.fromkeys(names, "x")).keys() == names - left_out


def test_a_container_is_restarted_by_systemd_alone():
    text = written(container=True)
    assert 'Environment="SPARKFORGE_RESTART=no"' in text
    assert "ExecStopPost=" in text
    assert "SPARKFORGE_RESTART" not in written()


def test_secrets_are_not_taken_over(monkeypatch):
    environment = {"SPARKFORGE_STATE": "/s", "HF_TOKEN": "hf_x", "VLLM_API_KEY": "k", "TP": ""}
    assert unit.carried(environment) == {"SPARKFORGE_STATE": "/s"}


def test_the_bound_of_the_memory_guard_and_the_allowed_hosts_are_taken_over():
    environment = {thresholds.VARIABLE: "0", access.HOSTS: "spark.local"}
    assert unit.carried(environment) == environment


def test_a_unit_that_was_edited_is_nobodys():
    text = written(root=Path("/srv/x"))
    assert unit.root_of(text) == "/srv/x"
    assert not unit.root_of(text + "Nice=5\n")
    assert not unit.root_of("")


class TestWithoutSystemd:
    def test_each_command_says_what_is_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(service, "BOOTED", tmp_path / "none")
        with pytest.raises(ServerError) as caught:
            service.version()
        assert caught.value.code == "server.service"
        assert "./inv up" in caught.value.fix

    def test_nothing_installed_names_the_command(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setattr(service, "SYSTEM_UNITS", tmp_path / "system")
        with pytest.raises(ServerError, match="no service is installed"):
            service.installed(system=False)


@pytest.mark.parametrize("text", ["[Service]\n", written(root=Path("/elsewhere")), "\udcff"])
def test_a_unit_of_somebody_else_is_neither_replaced_nor_removed(monkeypatch, tmp_path, text):
    monkeypatch.setattr(service, "SYSTEM_UNITS", tmp_path)
    monkeypatch.setattr(service, "version", lambda: 257)
    file = tmp_path / unit.NAME
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StorageError, match="is not this checkout's"):
        service.remove(system=True)
    with pytest.raises(StorageError, match="is not this checkout's"):
        service.install((), system=True, account="root", container=False, places=(), now=False)
    assert file.exists()


def test_an_account_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(service, "version", lambda: 257)
    with pytest.raises(UsageError, match="no account nobody-of-that-name"):
        service.install((), system=True, account="nobody-of-that-name", container=False, places=(), now=False)
    with pytest.raises(UsageError, match="needs --system"):
        service.install((), system=False, account="root", container=False, places=(), now=False)


def test_the_users_units_are_where_systemd_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Manager(False).file == tmp_path / "systemd/user/sparkforge.service"
    assert Manager(True).file == Path("/etc/systemd/system/sparkforge.service")


def test_a_service_that_ended_too_often_is_named_as_such():
    state = {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "24", "StartLimitBurst": "6"}
    assert "ended too often" in service._last_failure({**state, "NRestarts": "6"})
    assert "ended too often" not in service._last_failure({**state, "NRestarts": "0"})


class TestOptionsOfUp:
    @pytest.fixture
    def installed(self, monkeypatch):
        """Return the arguments of each unit that the command would install."""
        units = []
        monkeypatch.setattr(service, "version", lambda: 257)
        monkeypatch.setattr(service, "install", lambda arguments, **_: units.append(arguments))
        return units

    @pytest.mark.parametrize("variable", ["", "openai/gpt-oss-120b"])
    def test_a_system_unit_takes_no_repository_of_roots_own_cache(self, installed, monkeypatch, capsys, variable):
        monkeypatch.setenv("MODEL", variable)
        with pytest.raises(Exit):
            install(Context(), device="embedded", system=True, model="" if variable else "openai/gpt-oss-120b")
        assert installed == []
        assert "openai/gpt-oss-120b is not a folder" in capsys.readouterr().err

    def test_address_and_context_are_those_of_up(self, installed):
        install(Context(), device="embedded", host="localhost", context="4096")
        assert {"--host=127.0.0.1", "--context=4096"} <= set(installed[0])

    def test_vllms_flags_come_behind_two_dashes_with_the_callers_paths(self, installed, monkeypatch, tmp_path):
        monkeypatch.setenv("INV_CWD", str(tmp_path))
        install(Context(), device="embedded", vllm_flags=("--max-num-seqs", "4", "--chat-template=./x"))
        assert installed[0][-4:] == ("--", "--max-num-seqs", "4", f"--chat-template={tmp_path}/x")
        assert '"--" "--max-num-seqs" "4"' in written(arguments=installed[0])

    @pytest.mark.parametrize(
        "option",
        [{"host": "0.0.0.0"}, {"context": "many"}, {"vllm_flags": ("--api-key", "x")}],  # noqa: S104 - it is refused
    )
    def test_what_up_refuses_is_not_installed(self, installed, option):
        with pytest.raises(Exit) as refused:
            install(Context(), device="embedded", **option)
        assert refused.value.code == UsageError.exit_code
        assert not installed
