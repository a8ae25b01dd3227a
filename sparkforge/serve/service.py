"""The systemd service that starts a server at boot.

The unit runs `./inv up --foreground --hold`, so a start at boot is the start that a person makes: environment, model,
validation, server, first answers. systemd is told that it is ready once those answers are there.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import echo, say
from sparkforge.core.errors import ProcessError, ServerError, SparkforgeError, StorageError, UsageError
from sparkforge.core.files import write_atomic
from sparkforge.core.process import run
from sparkforge.serve import failure, record, unit
from sparkforge.serve.unit import NAME, ServiceUnit

CODE = "server.service"
SYSTEM_UNITS = Path("/etc/systemd/system")
BOOTED = Path("/run/systemd/system")  # sd_booted(3)
BY_HAND = "start it by hand: ./inv up; or let Docker start it: docs/guide/docker.md, Restarts"
SECONDS = 60.0  # for a call of systemctl; none of ours waits for a server


@dataclass(frozen=True)
class Manager:
    """A service manager, the system's or this user's own, which is asked about our unit."""

    system: bool

    @property
    def folder(self) -> Path:
        """Where its units are written."""
        return SYSTEM_UNITS if self.system else unit.own_user_folder()

    @property
    def file(self) -> Path:
        """Our unit."""
        return self.folder / NAME

    @property
    def name(self) -> str:
        """Whose it is, in words."""
        return "system" if self.system else "user"

    @property
    def option(self) -> str:
        """What our commands say for it."""
        return " --system" if self.system else ""

    @property
    def install(self) -> str:
        """The command that installs the unit."""
        return f"{self.sudo}./inv service.install{self.option}"

    @property
    def sudo(self) -> str:
        """What stands before an advised command that changes the unit."""
        return "sudo " if self.system else ""

    @property
    def systemctl(self) -> str:
        """The program and its option, as an advised command that changes the unit has them."""
        return "sudo systemctl" if self.system else "systemctl --user"

    def control(self, *arguments: str, check: bool = True) -> str:
        """Run `systemctl` and return what it prints. Raises ServerError."""
        command = ["systemctl", *([] if self.system else ["--user"]), "--no-pager", *arguments]
        runtime = Path(f"/run/user/{os.getuid()}")
        env = {"XDG_RUNTIME_DIR": str(runtime)} if not os.environ.get("XDG_RUNTIME_DIR") and runtime.is_dir() else {}
        try:
            result = run(command, env={**env, "LC_ALL": "C"}, check=False, seconds=SECONDS)
        except ProcessError as error:
            raise ServerError(error.what, error.why, "systemctl status", code=CODE) from error
        if result.returncode and check:
            raise self._failed(arguments, (result.stderr + result.stdout).strip())
        return result.stdout

    def _failed(self, arguments: tuple[str, ...], why: str) -> ServerError:
        fix = "systemctl status"
        if not self.system and re.search(r"[Ff]ailed to connect to (?:the )?(?:user )?(?:scope )?bus", why):
            fix = "log in by ssh, not by su or sudo; or use the system's: sudo ./inv service.install --system"
        elif re.search(r"[Aa]ccess denied|authentication required|[Pp]ermission denied", why):
            fix = Manager(True).install
            fix = fix.replace("install", "remove") if arguments[0] == "disable" else fix
        return ServerError(f"systemctl {arguments[0]} failed", why or "it printed nothing", fix, code=CODE)

    def show(self) -> dict[str, str]:
        """Return the unit's properties as systemd has them."""
        lines = self.control("show", NAME).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def version() -> int:
    """Return systemd's version. Raises ServerError where systemd is not what runs this machine."""
    if not shutil.which("systemctl") or not BOOTED.is_dir():
        missing = "there is no systemctl" if not shutil.which("systemctl") else f"there is no {BOOTED}"
        why = f"{missing}: systemd does not run this machine, or this is a container"
        raise ServerError("there is no systemd to start a server at boot", why, BY_HAND, code=CODE)
    match = re.match(r"systemd (\d+)", run(["systemctl", "--version"], check=False, seconds=SECONDS).stdout)
    return int(match[1]) if match else 0


def install(
    arguments: tuple[str, ...],
    *,
    system: bool,
    account: str,
    container: bool,
    places: tuple[Path, ...],
    now: bool,
    show: bool = False,
) -> None:
    """Write the unit for `./inv up` with `arguments`, and have it started at boot; with `now`, start it too.

    `account` runs a system unit; empty: who owns the checkout. With `show` the unit is printed, and nothing is changed.
    Raises ServerError, StorageError or UsageError.
    """
    manager, number = Manager(system), version()
    user = _account(account) if system else ""
    if account and not system:
        raise UsageError(f"--user {account} needs --system", "a user's own unit runs as that user", "add --system")
    text = ServiceUnit(
        arguments=arguments,
        user=user,
        container=container,
        version=number,
        environment=unit.carried(os.environ),
        places=places,
    ).text()
    if show:
        _print(manager, text)
        return
    former = _require_ours(manager)
    server = record.read() if now else None
    if server and server.alive and manager.show().get("ActiveState") not in {"active", "activating"}:
        why = f"{server.model_id} at {server.url} was started by hand"
        fix = f"./inv down, then ./inv service.install{manager.option} --now"
        raise ServerError("a server of this checkout runs already", why, fix, code="server.running")
    _enable(manager, former, text)
    pauses = "growing pauses, 5 s to 5 min" if number >= unit.GROWING_SINCE else "pauses of 30 s (systemd before 254)"
    say(f"systemd {number} starts it at boot and after a crash, with {pauses}; six ends in two hours stop it")
    if not system:
        _hint_lingering(getpass.getuser())
    if now:
        manager.control("reset-failed", NAME, check=False)
        manager.control("restart" if former not in {None, text} else "start", "--no-block", NAME)
        say(f"it starts now; watch it: ./inv service.status{manager.option}")


def remove(*, system: bool) -> None:
    """Stop the service and remove what `install` wrote. Raises ServerError or StorageError."""
    version()
    _remove(installed(system=system))


def _enable(manager: Manager, former: str | None, text: str) -> None:
    """Write the unit, if it is not there already, and have it started at boot. Raises ServerError or StorageError."""
    if former != text:
        _write(manager, text)
    manager.control("daemon-reload")
    manager.control("enable", NAME)
    say(f"{'unchanged' if former == text else 'wrote'} {manager.file}")


def _print(manager: Manager, text: str) -> None:
    echo(f"# {manager.file} would be:")
    echo(text, end="")


def _remove(manager: Manager) -> None:
    """Stop the unit and remove it, if it is ours. Raises ServerError or StorageError."""
    _require_ours(manager)
    manager.control("disable", "--now", NAME)
    manager.file.unlink(missing_ok=True)
    manager.control("daemon-reload")
    manager.control("reset-failed", NAME, check=False)  # it forgets the last failure
    say(f"removed {manager.file}")
    if (drop_ins := manager.file.with_name(f"{NAME}.d")).is_dir():
        say(f"{drop_ins} stays: it is yours")


def installed(*, system: bool) -> Manager:
    """Return the manager that has our unit: with `system` the system's, else this user's before it.

    Raises ServerError if there is none.
    """
    return _installed([Manager(True)] if system else [Manager(False), Manager(True)])


def _installed(managers: Sequence[Manager]) -> Manager:
    manager = next((manager for manager in managers if os.path.lexists(manager.file)), None)
    if manager is None:
        why = f"there is no {' and no '.join(str(manager.file) for manager in managers)}"
        raise ServerError("no service is installed", why, managers[0].install, code=CODE)
    return manager


def show(*, system: bool) -> None:
    """Print the unit's state, its last failure and its next start. Raises ServerError if it has failed for good."""
    version()
    manager = installed(system=system)
    state = manager.show()
    _show_state(manager, state)
    reason = _last_failure(state)
    echo(f"last failure: {reason or 'none since its last good start'}")
    echo(f"next start: {_next_start(state, manager)}")
    if state.get("ActiveState") == "failed":
        fix = f"./inv doctor; then {manager.systemctl} restart {NAME}"
        raise ServerError("the service has stopped trying", reason or f"Result={state.get('Result')}", fix, code=CODE)


def _show_state(manager: Manager, state: dict[str, str]) -> None:
    activity = f"{state.get('ActiveState', '?')} ({state.get('SubState', '?')})"
    since = f" since {stamp}" if (stamp := state.get("StateChangeTimestamp")) else ""
    echo(f"{NAME} ({manager.name}): {activity}{since} · {state.get('UnitFileState') or 'not enabled'}")
    echo(f"unit: {manager.file} · restarts: {state.get('NRestarts', '?')} · pid {state.get('MainPID', '?')}")
    if text := state.get("StatusText"):
        echo(f"says: {text}")


def _last_failure(state: dict[str, str]) -> str:
    """Return how the service failed last: what our command said, and how systemd names it."""
    reasons = []
    if (result := state.get("Result", "success")) != "success":
        code = state.get("ExecMainStatus", "")
        # A start that the limit prevents leaves the result of the last one.
        counts = [int(state.get(name) or 0) for name in ("NRestarts", "StartLimitBurst")]
        often = state.get("ActiveState") == "failed" and counts[0] >= counts[1] > 0
        limit = ": it ended too often, no more starts" if often or result == "start-limit-hit" else ""
        reasons.append(f"systemd says {result}{f' (code {code})' if code not in {'', '0'} else ''}{limit}")
    if last := failure.read(paths.state()):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.ended))
        reasons.append(f"{when}: {last.what}: {last.why.splitlines()[0] if last.why else ''} [{last.error}]")
    with suppress(SparkforgeError):
        server = record.read()
        end = record.ended(server) if server else None
        if server and end and not end.asked:
            reasons.append(f"the server {record.how_it_ended(server)}")
    return "; ".join(reasons)


def _next_start(state: dict[str, str], manager: Manager) -> str:
    """Return when the service starts next, as far as systemd or the held start says it."""
    activity, sub = state.get("ActiveState"), state.get("SubState")
    at_boot = "at boot" if state.get("UnitFileState") == "enabled" else "never by itself: it is not enabled"
    if sub == "auto-restart":
        pause = state.get("RestartUSecNext") or state.get("RestartUSec") or "?"
        return f"{pause} after {state.get('StateChangeTimestamp', 'its last end')}"
    if activity == "activating":
        return "now, or when the line above says so"
    if not manager.system and at_boot == "at boot" and not _lingers(getpass.getuser()):
        return f"at {getpass.getuser()}'s next login, not at boot: {_linger_command(getpass.getuser())}"
    return at_boot


def _account(name: str) -> str:
    """Return the account of a system unit. Raises UsageError for one that is not there."""
    owner = paths.ROOT.stat().st_uid
    try:
        return pwd.getpwnam(name).pw_name if name else pwd.getpwuid(owner).pw_name
    except KeyError:
        why = "this machine has no such account" if name else f"{paths.ROOT} belongs to uid {owner}, which has no name"
        raise UsageError(f"no account {name or owner}", why, "./inv service.install --system --user NAME") from None


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


def _write(manager: Manager, text: str) -> None:
    try:
        write_atomic(manager.file, text)
    except OSError as error:
        fix = manager.install if manager.system else f"mkdir -p {manager.folder}"
        raise StorageError(
            f"cannot write {manager.file}", error.strerror or str(error), fix, code="storage.access"
        ) from error


def _hint_lingering(user: str) -> None:
    """Say what a user's own unit takes besides: it starts at boot, and outlives a logout, if the user lingers."""
    if not _lingers(user):
        say(
            f"NOTE: it starts when {user} logs in and ends with the last session, whose shared memory logind deletes "
            f"(RemoveIPC). To start it at boot and keep it: {_linger_command(user)}"
        )


def _linger_command(user: str) -> str:
    return f"sudo loginctl enable-linger {user}"


def _lingers(user: str) -> bool:
    """Tell whether logind keeps this user's manager without a session (loginctl enable-linger)."""
    return (Path("/var/lib/systemd/linger") / user).exists()
