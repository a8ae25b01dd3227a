"""The systemd unit: quoting, its mark, and what an installation refuses."""

import getpass
import subprocess
from pathlib import Path

import pytest
from invoke.context import Context
from invoke.exceptions import Exit
from programs import write_program

from sparkforge.cli.serve import service_install
from sparkforge.core.errors import InputError, ServerError, SparkforgeError, StorageError, UsageError
from sparkforge.plan import thresholds
from sparkforge.serve import access, service
from sparkforge.serve.service import ServiceUnit

ODD = '/srv/a b 100% ä $HOME "q" \\x'


def written(**changes):
    values = {"arguments": ("--port=8000",), "user": "root", "container": False, "version": 257, **changes}
    return ServiceUnit(**values).text()


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("container", [False, True])
def test_systemd_reads_the_unit_without_a_complaint(tmp_path, container):
    def run(*arguments):
        command = ["systemd-analyze", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    root, unit = tmp_path / "a b 100% ä", tmp_path / "sparkforge.service"
    write_program(root / "inv", "")
    version = int(run("--version").stdout.split()[1])
    settings = {"container": container, "version": version, "environment": {"A": 'b "c" %h'}, "places": (root,)}
    unit.write_text(written(root=root, **settings))
    complaints = run("verify", "--man=no", str(unit)).stderr.splitlines()
    assert [line for line in complaints if unit.name in line] == []


def test_words_are_escaped_and_no_variable_is_replaced():
    text = written(arguments=(f"--model={ODD}",), root=Path("/srv/100% x"))
    assert '"--model=/srv/a b 100%% ä $HOME \\"q\\" \\\\x"' in text
    assert 'ExecStart=:"/srv/100%% x/inv" "up" "--foreground" "--hold"' in text
    assert "WorkingDirectory=/srv/100%% x\n" in text
    for path in ("/srv/a\nExecStart=x", "/srv/\udcff", "/srv/a\\"):
        with pytest.raises(UsageError, match="cannot be in a unit"):
            written(root=Path(path))


SHM = ("TemporaryFileSystem=/dev/shm", 'Environment="SPARKFORGE_OWN_SHM=1"')
LIMITS = ("OOMScoreAdjust=500", "MemoryMax=90%")
DOCKER = ('Environment="SPARKFORGE_RESTART=no"', "ExecStopPost=")


@pytest.mark.parametrize(
    ("unit_of", "has", "has_not"),
    [
        ({}, (*SHM, *LIMITS, "User=root", "WantedBy=multi-user.target"), DOCKER),
        ({"user": ""}, (*LIMITS, "WantedBy=default.target"), (*SHM, "User=")),  # a user's manager may not set these
        ({"container": True}, DOCKER, (*SHM, *LIMITS)),  # a container has its own
        ({"version": 253}, ("RestartSec=30s",), ("RestartMaxDelaySec",)),
        ({"version": 254, "environment": {"A": "b%"}}, ("RestartMaxDelaySec=5min", 'Environment="A=b%%"'), ()),
    ],
)
def test_each_unit_has_its_own_limits_and_none_that_systemd_or_the_container_lacks(unit_of, has, has_not):
    text = written(**unit_of)
    assert [line for line in has if f"\n{line}" not in text] == []
    assert [line for line in has_not if f"\n{line}" in text] == []


def test_no_restart_where_it_would_not_help():
    codes = {family.family: family.exit_code for family in SparkforgeError.__subclasses__()}
    lasting = " ".join(str(codes[name]) for name in ("usage", "input", "integrity", "patch", "validation"))
    assert f"\nRestartPreventExitStatus={lasting}\n" in written()


def test_settings_are_copied_but_secrets_are_not():
    carried = {"SPARKFORGE_STATE": "/s", thresholds.VARIABLE: "0", access.HOSTS: "spark.local"}
    assert service.carried({**carried, "HF_TOKEN": "hf_x", "VLLM_API_KEY": "k", "TP": ""}) == carried


def test_an_edited_unit_no_longer_counts_as_ours():
    text = written(root=Path("/srv/x"))
    assert service.root_of(text) == "/srv/x"
    assert not service.root_of(text + "Nice=5\n")
    assert not service.root_of("")


@pytest.fixture
def systemctl(monkeypatch, tmp_path):
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(service, "MACHINE", tmp_path)
    (tmp_path / service.BOOTED).mkdir(parents=True)
    (tmp_path / service.SYSTEM_UNITS).mkdir(parents=True)

    def systemctl(properties=""):
        answers = f"--version) echo systemd 257;; *show*) echo '{properties}';;"
        write_program(folder / "systemctl", f'echo "$*" >> {tmp_path}/calls\ncase "$*" in {answers} esac')

    systemctl()
    return systemctl


@pytest.mark.parametrize("text", [written(root=Path("/elsewhere")), "\udcff"])
@pytest.mark.usefixtures("systemctl")
def test_a_unit_of_somebody_else_is_neither_replaced_nor_removed(tmp_path, text):
    file = tmp_path / service.SYSTEM_UNITS / service.NAME
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StorageError, match="is not this checkout's"):
        service.remove(system=True)
    with pytest.raises(StorageError, match="is not this checkout's"):
        service.install(ServiceUnit(), system=True, account="root", now=False)
    assert file.exists()


@pytest.mark.usefixtures("systemctl")
def test_an_account_a_unit_or_systemd_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="no account nobody"):
        service.install(ServiceUnit(), system=True, account="nobody-of-that-name", now=False)
    with pytest.raises(UsageError, match="needs --system"):
        service.install(ServiceUnit(), system=False, account="root", now=False)
    with pytest.raises(ServerError, match="no service is installed") as caught:
        service.remove(system=False)
    assert f"{tmp_path}/systemd/user" in caught.value.why
    (tmp_path / service.BOOTED).rmdir()
    with pytest.raises(ServerError, check=lambda error: error.code == "server.service" and "./inv up" in error.fix):
        service.version()


def test_a_users_own_unit_is_installed_and_removed(systemctl, capsys, tmp_path):
    systemctl("ActiveState=inactive\nUnitFileState=enabled")
    service.install(ServiceUnit(arguments=("--port=8001",)), system=False, account="", now=True)
    file = tmp_path / "systemd/user/sparkforge.service"
    assert '"--port=8001"' in file.read_text()
    assert "sudo loginctl enable-linger" in capsys.readouterr().err
    (tmp_path / service.LINGERING).mkdir(parents=True)
    (tmp_path / service.LINGERING / getpass.getuser()).touch()
    service.install(ServiceUnit(arguments=("--port=8001",)), system=False, account="", now=False)
    said = capsys.readouterr().err
    assert "unchanged" in said
    assert "loginctl" not in said
    service.remove(system=False)
    assert not file.exists()
    assert "disable --now sparkforge.service" in (tmp_path / "calls").read_text()


@pytest.mark.usefixtures("systemctl")
def test_the_options_of_up_are_in_the_unit_with_the_callers_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("INV_CWD", str(tmp_path))
    flags = ("--max-num-seqs", "4", "--chat-template=./x")
    service_install(Context(), device="embedded", host="localhost", context="4096", vllm_flags=flags)
    text = (tmp_path / "systemd/user" / service.NAME).read_text()
    assert '"--host=127.0.0.1"' in text
    assert '"--context=4096"' in text
    assert f'"--" "--max-num-seqs" "4" "--chat-template={tmp_path}/x"' in text


@pytest.mark.parametrize(
    ("option", "failure"),
    [
        ({"host": "0.0.0.0"}, "needs --api-key-file"),  # noqa: S104 - it is refused
        ({"vllm_flags": ("--api-key", "x")}, "--api-key cannot"),
        ({"system": True, "model": "openai/gpt-oss-120b"}, "openai/gpt-oss-120b is not a folder"),  # root's own cache
    ],
)
@pytest.mark.usefixtures("systemctl")
def test_options_that_up_refuses_are_not_installed(capsys, tmp_path, option, failure):
    with pytest.raises(Exit) as refused:
        service_install(Context(), device="embedded", **option)
    assert refused.value.code in (UsageError.exit_code, InputError.exit_code)
    assert failure in capsys.readouterr().err
    assert not list(tmp_path.rglob(service.NAME))
