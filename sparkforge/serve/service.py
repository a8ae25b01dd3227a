"""The systemd service that starts a server at boot.

The unit runs `./inv up --foreground --hold`, so a start at boot has the same steps as a manual one: environment, model,
validation, server, first answers. systemd gets the readiness notification after those answers.
"""

import getpass
import hashlib
import os
import pwd
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import echo, say
from sparkforge.core.errors import (
    InputError,
    IntegrityError,
    PatchError,
    ProcessError,
    RefusalError,
    ServerError,
    StorageError,
    UsageError,
    on,
)
from sparkforge.core.files import write_atomic
from sparkforge.core.process import run_unchecked
from sparkforge.serve import record

CODE = "server.service"
MACHINE = Path("/")  # the folder above SYSTEM_UNITS, BOOTED and LINGERING
SYSTEM_UNITS = "etc/systemd/system"
BOOTED = "run/systemd/system"  # sd_booted(3)
LINGERING = "var/lib/systemd/linger"  # a file for each user whose manager logind keeps
SECONDS = 60.0  # for a call of systemctl; none of ours waits for a server


@dataclass(frozen=True)
class ServiceUnit:
    """A unit to write: the arguments of `./inv up`, and its owner.

    `user` is the account of a system unit, empty for a user's own. `version` is systemd's. `places` are folders that
    must be mounted before it starts.
    """

    arguments: tuple[str, ...] = ()
    user: str = ""
    container: bool = False
    version: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    places: tuple[Path, ...] = ()
    root: Path = paths.ROOT

    def text(self) -> str:
        """Return the unit's text, its mark included. Raises UsageError for a path that a unit cannot hold."""
        true = {
            "system" if self.user else "user",
            "docker" if self.container else "embedded",
            "growing" if self.version >= GROWING_SINCE else "constant",
        }
        inv, variables = quoted(str(self.root / "inv")), sorted(self.environment.items())
        values = {
            "places": " ".join(quoted(str(place)) for place in (self.root, *self.places)),
            "folder": plain(str(self.root)),
            "inv": inv,
            "inv_in_shell": inv.replace("$", "$$"),
            "arguments": "".join(f" {quoted(word)}" for word in self.arguments),
            "user": self.user,
            "lasting": " ".join(str(family.exit_code) for family in LASTING),
            "environment": "\n".join(f"Environment={quoted(f'{name}={value}')}" for name, value in variables),
        }
        template = (paths.ROOT / TEMPLATE).read_text(encoding="utf-8")
        rows = [line.split("|", 1) for line in template.splitlines() if not line.startswith("#")]
        body = "".join(f"{line[1:].format(**values)}\n" for words, line in rows if true.issuperset(words.split()))
        return MARK.format(root=self.root, digest=hashlib.sha256(body.encode()).hexdigest()) + body


class Manager:
    """The system's or this user's service manager, for queries about our unit.

    `file` is the unit's file, and `option` selects the manager in our commands. Advised commands that change the unit
    begin with `self.sudo` or `self.systemctl`: `sudo ` and `sudo systemctl` for the system's unit, nothing and
    `systemctl --user` for a user's own.
    """

    def __init__(self, system: bool) -> None:
        own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
        self.system, self.file = system, (MACHINE / SYSTEM_UNITS if system else own) / NAME
        self.option, self.sudo, self.systemctl = "", "", "systemctl --user"
        if system:
            self.option, self.sudo, self.systemctl = " --system", "sudo ", "sudo systemctl"

    def control(self, *arguments: str, check: bool = True) -> str:
        """Run `systemctl` and return its output. Raises ServerError."""
        command = ["systemctl", *([] if self.system else ["--user"]), "--no-pager", *arguments]
        runtime = Path(f"/run/user/{os.getuid()}")
        env = {"XDG_RUNTIME_DIR": str(runtime)} if not os.environ.get("XDG_RUNTIME_DIR") and runtime.is_dir() else {}
        try:
            result = run_unchecked(command, env={**env, "LC_ALL": "C"}, seconds=SECONDS)
        except ProcessError as error:
            raise ServerError(error.what, error.why, "systemctl status", code=CODE) from error
        if result.returncode and check:
            why, fix = (result.stderr + result.stdout).strip(), "systemctl status"
            if not self.system and re.search(r"[Ff]ailed to connect to (?:the )?(?:user )?(?:scope )?bus", why):
                fix = "sudo ./inv service.install --system   # or log in by ssh, not by su or sudo"
            elif re.search(r"[Aa]ccess denied|authentication required|[Pp]ermission denied", why):
                fix = f"sudo ./inv service.{'remove' if arguments[0] == 'disable' else 'install'} --system"
            raise ServerError(f"systemctl {arguments[0]} failed", why or "it printed nothing", fix, code=CODE)
        return result.stdout

    def show(self) -> dict[str, str]:
        """Return the unit's properties as systemd has them."""
        lines = self.control("show", NAME).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def version() -> int:
    """Return systemd's version. Raises ServerError if systemd does not run this machine."""
    booted = MACHINE / BOOTED
    if not shutil.which("systemctl") or not booted.is_dir():
        missing = "there is no systemctl" if not shutil.which("systemctl") else f"there is no {booted}"
        why = f"{missing}: systemd does not run this machine, or this is a container"
        fix = "./inv up   # by hand; or let Docker start it: docs/guide/docker.md, Restarts"
        raise ServerError("there is no systemd to start a server at boot", why, fix, code=CODE)
    match = re.match(r"systemd (\d+)", run_unchecked(["systemctl", "--version"], seconds=SECONDS).stdout)
    return int(match[1]) if match else 0


def install(wanted: ServiceUnit, *, system: bool, account: str, now: bool, show: bool = False) -> None:
    """Write the unit and have it started at boot; with `now`, start it too; with `show`, only print it.

    `account` runs a system unit; empty: the owner of the checkout. Raises ServerError, StorageError or UsageError.
    """
    manager, number, user = Manager(system), version(), ""
    if account and not system:
        raise UsageError(f"--user {account} needs --system", "a user's own unit runs as that user", "--system")
    if system:
        owner = paths.ROOT.stat().st_uid
        try:
            user = pwd.getpwnam(account).pw_name if account else pwd.getpwuid(owner).pw_name
        except KeyError:
            why = "this machine has no such account" if account else f"{paths.ROOT} belongs to it, and it has no name"
            fix = "./inv service.install --system --user NAME"
            raise UsageError(f"no account {account or owner}", why, fix) from None
    text = replace(wanted, user=user, version=number, environment=carried(os.environ)).text()
    if show:
        echo(f"# {manager.file} would be:")
        echo(text, end="")
        return
    former = _require_ours(manager)
    server = record.read() if now else None
    if server and server.alive and manager.show().get("ActiveState") not in {"active", "activating"}:
        why = f"{server.model_id} at {server.url} was started by hand"
        fix = f"./inv down && ./inv service.install{manager.option} --now"
        raise ServerError("a server of this checkout runs already", why, fix, code="server.running")
    if former != text:
        try:
            write_atomic(manager.file, text)
        except OSError as error:
            fix = "sudo ./inv service.install --system" if system else on("mkdir -p", manager.file.parent)
            why = error.strerror or str(error)
            raise StorageError(f"cannot write {manager.file}", why, fix, code="storage.access") from error
    manager.control("daemon-reload")
    manager.control("enable", NAME)
    say(f"{'unchanged' if former == text else 'wrote'} {manager.file}")
    pauses = "growing pauses, 5 s to 5 min" if number >= GROWING_SINCE else "pauses of 30 s (systemd before 254)"
    limit = "if it was started six times within two hours, systemd does not start it again"
    say(f"systemd {number} starts it at boot and after a crash, with {pauses}; {limit}")
    if not system and not (MACHINE / LINGERING / (name := getpass.getuser())).exists():
        say(
            f"NOTE: it starts when {name} logs in and ends with the last session, whose shared memory logind deletes "
            f"(RemoveIPC). To start it at boot and keep it: sudo loginctl enable-linger {name}"
        )
    if now:
        manager.control("reset-failed", NAME, check=False)
        manager.control("restart" if former not in {None, text} else "start", "--no-block", NAME)
        say(f"it starts now; watch it: {manager.systemctl.removeprefix('sudo ')} status {NAME}")


def remove(*, system: bool) -> None:
    """Stop and remove the system's unit if `system`; otherwise this user's, or the system's if this user has none.

    Raises ServerError or StorageError.
    """
    version()
    managers = [Manager(True)] if system else [Manager(False), Manager(True)]
    manager = next((manager for manager in managers if os.path.lexists(manager.file)), None)
    if manager is None:
        why, first = f"there is no {' and no '.join(str(manager.file) for manager in managers)}", managers[0]
        fix = f"{first.sudo}./inv service.install{first.option}"
        raise ServerError("no service is installed", why, fix, code=CODE)
    _require_ours(manager)
    manager.control("disable", "--now", NAME)
    manager.file.unlink(missing_ok=True)
    manager.control("daemon-reload")
    manager.control("reset-failed", NAME, check=False)  # it forgets the last failure
    say(f"removed {manager.file}")
    if (drop_ins := manager.file.with_name(f"{NAME}.d")).is_dir():
        say(f"{drop_ins} stays: it is yours")


def _require_ours(manager: Manager) -> str | None:
    """Return the installed unit's text, None for none. Raises StorageError for a unit that we did not write."""
    text, why = "", "it was edited, or ./inv service.install did not write it; put your own lines into a drop-in"
    try:
        if not os.path.lexists(manager.file):
            return None
        text = manager.file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = str(error)
    root, fix = root_of(text), f"{manager.systemctl} disable --now {NAME}; {manager.sudo}rm {manager.file}"
    if root == str(paths.ROOT):
        return text
    if root:
        why, fix = f"{root} wrote it", f"{manager.sudo}{root}/inv service.remove{manager.option}"
    raise StorageError(f"{manager.file} is not this checkout's", why, fix, code="storage.access")


TEMPLATE = "deploy/sparkforge.service"
NAME = "sparkforge.service"
GROWING_SINCE = 254  # the first systemd with RestartSteps= and RestartMaxDelaySec= (its NEWS)
# A restart does not fix a wrong argument, a missing model, a wrong hash, a broken patch or a refusal.
LASTING = (UsageError, InputError, IntegrityError, PatchError, RefusalError)
MARK = "# Written by `./inv service.install` of {root}; sha256 of what follows: {digest}\n"
# Variables that a unit takes over from the installing shell. Secrets must not be among them, nor SPARKFORGE_VALIDATE: a
# check that was switched off for one start must not be off at every boot.
CARRIED = (
    "SPARKFORGE_STATE", "SPARKFORGE_CACHE", "SPARKFORGE_COMPOSE_FILES", "SPARKFORGE_STACK", "SPARKFORGE_MODELS",
    "SPARKFORGE_MODEL", "SPARKFORGE_MODEL_NAME", "SPARKFORGE_MODEL_ID", "SPARKFORGE_SERVE_PROFILE", "SPARKFORGE_BIND",
    "SPARKFORGE_ALLOWED_HOSTS", "SPARKFORGE_MEMORY", "SPARKFORGE_SHM", "SPARKFORGE_MEMLOCK", "SPARKFORGE_GUARD_GIB",
    "SPARKFORGE_METRICS", "SPARKFORGE_LIMITS", "SPARKFORGE_START_PERIOD", "SPARKFORGE_VALIDATE_SECONDS", "VLLM_ARGS",
    "COMPOSE_PROJECT_NAME", "DOCKER_HOST", "DOCKER_CONFIG", "TP", "MAX_MODEL_LEN", "OMP_NUM_THREADS", "HF_HOME",
    "HF_HUB_CACHE", "PYTHON", *(variable for variable, _ in paths.USER_FOLDERS.values()),
)  # fmt: skip


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that a unit takes over."""
    return {name: environment[name] for name in CARRIED if environment.get(name)}


def root_of(text: str) -> str:
    """Return the checkout that wrote the unit; empty if none did, or somebody has edited it since."""
    first, _, body = text.partition("\n")
    start, _, digest = first.partition("; sha256 of what follows: ")
    begin = MARK.partition("{root}")[0]
    written = start.startswith(begin) and digest == hashlib.sha256(body.encode()).hexdigest()
    return start.removeprefix(begin) if written else ""


def quoted(word: str) -> str:
    """Return a word quoted for a unit (systemd.syntax(7)). Raises UsageError for control characters, invalid UTF-8."""
    return '"' + plain(word + " ")[:-1].replace("\\", "\\\\").replace('"', '\\"') + '"'


def plain(text: str) -> str:
    """Return a value for a setting that systemd reads unquoted to the end of the line, such as WorkingDirectory=.

    Raises UsageError.
    """
    if text.endswith("\\") or any(ord(letter) < 32 or "\ud800" <= letter <= "\udfff" for letter in text):
        why = "a unit's line holds UTF-8 without control characters and does not end with a backslash"
        fix = "again   # first move the checkout, the model or the state folder"
        raise UsageError(f"{text!r} cannot be in a unit", why, fix)
    return text.replace("%", "%%")
