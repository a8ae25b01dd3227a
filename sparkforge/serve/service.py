"""The systemd service that starts a server at boot.

The unit runs `./inv up --foreground --hold`, so a start at boot is the start that a person makes: environment, model,
validation, server, first answers. systemd gets the readiness notification after those answers.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.advice import on
from sparkforge.core.console import echo, say
from sparkforge.core.errors import ProcessError, ServerError, StorageError, UsageError
from sparkforge.core.files import write_atomic
from sparkforge.core.process import run_unchecked
from sparkforge.serve import record, unit
from sparkforge.serve.unit import NAME, ServiceUnit

CODE = "server.service"
MACHINE = Path("/")  # below it lie SYSTEM_UNITS, BOOTED and LINGERING
SYSTEM_UNITS = "etc/systemd/system"
BOOTED = "run/systemd/system"  # sd_booted(3)
BY_HAND = "./inv up   # by hand; or let Docker start it: docs/guide/docker.md, Restarts"
LINGERING = "var/lib/systemd/linger"  # a file for each user whose manager logind keeps
SECONDS = 60.0  # for a call of systemctl; none of ours waits for a server


@dataclass(frozen=True)
class Manager:
    """A service manager, the system's or this user's own, which is asked about our unit."""

    system: bool

    @property
    def file(self) -> Path:
        """Our unit."""
        own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
        return (MACHINE / SYSTEM_UNITS if self.system else own) / NAME

    @property
    def option(self) -> str:
        """The scope in our commands' words."""
        return " --system" if self.system else ""

    @property
    def sudo(self) -> str:
        """The prefix of an advised command that changes the unit."""
        return "sudo " if self.system else ""

    @property
    def systemctl(self) -> str:
        """The program and its option, as an advised command that changes the unit has them."""
        return "sudo systemctl" if self.system else "systemctl --user"

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
    """Return systemd's version. Raises ServerError where systemd is not what runs this machine."""
    booted = MACHINE / BOOTED
    if not shutil.which("systemctl") or not booted.is_dir():
        missing = "there is no systemctl" if not shutil.which("systemctl") else f"there is no {booted}"
        why = f"{missing}: systemd does not run this machine, or this is a container"
        raise ServerError("there is no systemd to start a server at boot", why, BY_HAND, code=CODE)
    match = re.match(r"systemd (\d+)", run_unchecked(["systemctl", "--version"], seconds=SECONDS).stdout)
    return int(match[1]) if match else 0


def install(wanted: ServiceUnit, *, system: bool, account: str, now: bool, show: bool = False) -> None:
    """Write the unit and have it started at boot; with `now`, start it too.

    `account` runs a system unit; empty: the owner of the checkout. With `show` the unit is only printed.
    Raises ServerError, StorageError or UsageError.
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
    text = replace(wanted, user=user, version=number, environment=unit.carried(os.environ)).text()
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
    pauses = "growing pauses, 5 s to 5 min" if number >= unit.GROWING_SINCE else "pauses of 30 s (systemd before 254)"
    say(f"systemd {number} starts it at boot and after a crash, with {pauses}; six ends in two hours stop it")
    if not system and not (MACHINE / LINGERING / getpass.getuser()).exists():
        say(
            f"NOTE: it starts when {getpass.getuser()} logs in and ends with the last session, whose shared memory "
            f"logind deletes (RemoveIPC). To start it at boot and keep it: "
            f"sudo loginctl enable-linger {getpass.getuser()}"
        )
    if now:
        manager.control("reset-failed", NAME, check=False)
        manager.control("restart" if former not in {None, text} else "start", "--no-block", NAME)
        say(f"it starts now; watch it: {manager.systemctl.removeprefix('sudo ')} status {NAME}")


def remove(*, system: bool) -> None:
    """Stop the service and remove what `install` wrote, with `system` the system's, else this user's before it.

    Raises ServerError if there is none, or StorageError.
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
    """Return the unit that stands there, None for none. Raises StorageError for one of somebody else."""
    text, why = "", "it is edited, or no ./inv service.install wrote it; lines of yours go into a drop-in"
    try:
        if not os.path.lexists(manager.file):
            return None
        text = manager.file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = str(error)
    root = unit.root_of(text)
    if root == str(paths.ROOT):
        return text
    fix = f"{manager.systemctl} disable --now {NAME}; {manager.sudo}rm {manager.file}"
    if root:
        why, fix = f"{root} wrote it", f"{manager.sudo}{root}/inv service.remove{manager.option}"
    raise StorageError(f"{manager.file} is not this checkout's", why, fix, code="storage.access")
