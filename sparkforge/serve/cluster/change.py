"""What `./inv cluster.setup` changes on a node: `python3 - ARGUMENT < change.py`, which prints one JSON object.

It runs as root, by that machine's own Python 3.9 or newer, and imports the standard library alone. It knows nothing of
clusters: it gets files, lines, a key, kernel settings and interfaces, and makes them so. Before the first change it
writes down how everything was (RECORD), so that a killed one can be run again or undone.

The argument is a JSON object with a `mode`:
  look     say who logs in, what configures the network, and the public keys
  differ   return what `apply` would change
  apply    change it
  restore  undo every change in the record; with `show`, only say which
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RECORD = "var/lib/sparkforge/cluster.json"
HOST_KEY = "etc/ssh/ssh_host_ed25519_key.pub"
PROGRAM_SECONDS = 60
NETPLAN, NETWORK_MANAGER = "netplan", "networkmanager"
NETWORK_FOLDERS = ("/etc/netplan", "/etc/NetworkManager/system-connections")
Answer = dict[str, Any]


def look(options: Answer) -> Answer:
    """Say what the plan needs to know. `elsewhere` are netplan's files of others that name an interface of `names`."""
    root, account = Path(options["root"]), login()
    netplan = root / "etc/netplan"
    others = [file for file in sorted(netplan.glob("*.yaml")) if file.name != options["own"]]
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in others}
    public = root / account.pw_dir.lstrip("/") / options["key"]
    return {
        "user": account.pw_name,
        "home": account.pw_dir,
        "manager": manager(root),
        "host_key": content(root / HOST_KEY),
        "public_key": content(public.with_name(f"{public.name}.pub")),
        "elsewhere": {
            name: [file for file, text in texts.items() if name in text]
            for name in options["names"]
            if any(name in text for text in texts.values())
        },
        "recorded": (root / RECORD).exists(),
    }


def login() -> pwd.struct_passwd:
    """Return the account that logged in, which sudo names."""
    name = os.environ.get("SUDO_USER")
    return pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())


def manager(root: Path) -> str:
    """Return which program configures the network at boot; empty for none that we know."""
    if (root / "etc/netplan").is_dir() and shutil.which("netplan"):
        return NETPLAN
    if (root / "etc/NetworkManager/system-connections").is_dir() and shutil.which("nmcli"):
        return NETWORK_MANAGER
    return ""


def content(file: Path) -> str:
    """Return a small file's text without its last newline; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def differ(options: Answer) -> Answer:
    """Return the changes that are needed, each with its kind and the names of what it changes."""
    root = Path(options["root"])
    changes: list[Answer] = []
    for file in options.get("files", ()):
        before = existing(target(root, file["path"]))
        if before is None or before["data"] != file["text"].encode() or before["mode"] != file["mode"]:
            changes.append({"kind": "file", **file, "replaces": before is not None})
    changes += [
        {"kind": "line", **line}
        for line in options.get("lines", ())
        if line["line"].encode() not in (existing(target(root, line["path"])) or {"data": b""})["data"].split(b"\n")
    ]
    if (key := options.get("key")) and not target(root, key).exists():
        changes.append({"kind": "key", "path": key})
    changes += [
        {"kind": "kernel", "name": name, "before": now, "value": value}
        for name, value in options.get("kernel", {}).items()
        if (now := content(root / "proc/sys" / name)) != value
    ]
    for name, wanted in options.get("interfaces", {}).items():
        now_is = interface(name)
        missing = [address for address in wanted["addresses"] if address not in now_is["addresses"]]
        if missing or now_is["mtu"] != wanted["mtu"]:
            changes.append({"kind": "interface", "name": name, "before": now_is, "missing": missing, **wanted})
    return {"changes": changes}


def apply(options: Answer) -> Answer:
    """Make everything as it is wanted, and return the changes. Raises OSError, ValueError or SubprocessError."""
    root = Path(options["root"])
    with locked(root / RECORD):
        record = read_record(root) or {"state": "done", "entries": [], "kernel": {}, "interfaces": {}}
        changes = differ(options)["changes"]
        if not changes and record["state"] == "done":
            return {"changes": []}
        files = [change for change in changes if change["kind"] == "file"]
        validate(root, files)
        for change in changes:
            remember(root, record, change)
        # Only what concerns it makes the network's program read its files again, which can interrupt connections.
        own = [file for file in files if Path(file["path"]).parent.as_posix() in NETWORK_FOLDERS]
        network = own or record["state"] == "begun" or any(change["kind"] == "interface" for change in changes)
        record.update(state="begun", manager=options.get("manager", ""))
        write_record(root, record)
        for change in changes:
            put(root, change)
        if network:
            configure(options.get("manager", ""), options.get("connections", ()))
        record["state"] = "done"
        write_record(root, record)
        return {"changes": changes}


def validate(root: Path, files: list[Answer]) -> None:
    """Let netplan read its files with ours among them, in a folder of its own, before one of them changes."""
    ours = [file for file in files if Path(file["path"]).parent == Path("/etc/netplan")]
    if not ours or not shutil.which("netplan"):
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "etc/netplan")
        shutil.copytree(root / "etc/netplan", folder)
        for file in ours:
            copy = folder / Path(file["path"]).name
            copy.write_text(file["text"], encoding="utf-8")
            copy.chmod(file["mode"])
        run("netplan", "generate", "--root-dir", name)


def remember(root: Path, record: Answer, change: Answer) -> None:
    """Write into the record how that was which a change touches, unless an earlier change of ours is there already."""
    kind = change["kind"]
    if kind == "kernel":
        record["kernel"].setdefault(change["name"], change["before"])
    elif kind == "interface":
        saved = record["interfaces"].setdefault(change["name"], {"before": change["before"], "ours": []})
        saved["ours"] += [address for address in change["missing"] if address not in saved["ours"]]
    else:
        path = target(root, change["path"])
        entry = next((entry for entry in record["entries"] if entry["path"] == str(path)), None)
        if entry is None:
            before = existing(path)
            saved_before = before and {**before, "data": base64.b64encode(before["data"]).decode()}
            folders = [str(folder) for folder in path.parents if not folder.exists()]
            entry = {"kind": kind, "path": str(path), "before": saved_before, "folders": folders, "ours": []}
            record["entries"].append(entry)
        if kind != "key":
            entry["ours"].append(change["text" if kind == "file" else "line"])


def put(root: Path, change: Answer) -> None:
    """Make one change. An interface is the business of the program that configures the network."""
    kind = change["kind"]
    if kind == "kernel":
        (root / "proc/sys" / change["name"]).write_text(change["value"], encoding="ascii")
    elif kind == "file":
        write(target(root, change["path"]), change["text"].encode(), change["mode"])
    elif kind == "line":
        path = target(root, change["path"])
        before = existing(path) or {"data": b"", "mode": 0o600}
        separator = b"" if before["data"].endswith(b"\n") or not before["data"] else b"\n"
        write(path, before["data"] + separator + change["line"].encode() + b"\n", before["mode"])
    elif kind == "key":
        make_key(target(root, change["path"]))


def make_key(path: Path) -> None:
    """Make a key pair without a passphrase; the private half appears last."""
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sparkforge-") as name:
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", f"{name}/key")
        write(path.with_name(f"{path.name}.pub"), Path(name, "key.pub").read_bytes(), 0o644)
        write(path, Path(name, "key").read_bytes(), 0o600)


def configure(program: str, connections: Any) -> None:
    """Let the program that configures the network read its files again."""
    if program == NETPLAN:
        run("netplan", "apply")
    elif program == NETWORK_MANAGER:
        run("nmcli", "connection", "reload")
        for connection in connections:
            run("nmcli", "connection", "up", connection)


def restore(options: Answer) -> Answer:
    """Undo what the record says, and return what was undone and which files somebody else has changed since."""
    root = Path(options["root"])
    if not (root / RECORD).exists():
        return {"undone": [], "kept": []}
    with locked(root / RECORD):
        record = read_record(root)
        if record is None:
            return {"undone": [], "kept": []}
        kept = [entry["path"] for entry in record["entries"] if undone(entry) is None]
        names = [entry["path"] for entry in record["entries"] if entry["path"] not in kept]
        names += [*record["kernel"], *record["interfaces"]]
        if options.get("show"):
            return {"undone": names, "kept": kept}
        record["state"] = "begun"
        write_record(root, record)
        for entry in reversed(record["entries"]):
            if (state := undone(entry)) is not None:
                put_back(entry, state)
        for name, value in record["kernel"].items():
            with suppress(OSError):  # an interface that is gone has no settings
                (root / "proc/sys" / name).write_text(value, encoding="ascii")
        configure(record.get("manager", ""), ())
        for name, saved in record["interfaces"].items():
            put_interface_back(name, saved)
        if kept:
            entries = [entry for entry in record["entries"] if entry["path"] in kept]
            manager = record.get("manager", "")
            # A network file that stays gives the interfaces their addresses again; the next restore takes them away.
            left = {"entries": entries, "kernel": {}, "interfaces": record["interfaces"]}
            write_record(root, {"state": "begun", "manager": manager, **left})
        else:
            (root / RECORD).unlink()
        return {"undone": names, "kept": kept}


def undone(entry: Answer) -> Answer | None:
    """Return how a file is to be after a restore, {} for not at all; None where somebody else has changed our file."""
    path, before = Path(entry["path"]), entry["before"]
    old = before and {**before, "data": base64.b64decode(before["data"])}
    now = existing(path)
    if entry["kind"] == "key":
        return old or {}
    if now is None:  # somebody has removed it
        return {}
    if old and now["data"] == old["data"]:
        return dict(old)
    if entry["kind"] == "file":
        return (old or {}) if now["data"].decode(errors="replace") in entry["ours"] else None
    lines = now["data"].split(b"\n")
    rest = b"\n".join(line for line in lines if line.decode(errors="replace") not in entry["ours"])
    if old is None:
        return {**now, "data": rest} if rest.strip() else {}
    # A file that lacked its last newline got one before our line.
    return {**now, "data": old["data"] if rest in (old["data"], old["data"] + b"\n") else rest}


def put_back(entry: Answer, state: Answer) -> None:
    """Make a file as it was, and remove folders that we made for it and that are empty."""
    path = Path(entry["path"])
    if state:
        write(path, state["data"], state["mode"], (state["user"], state["group"]))
        return
    for name in (path, *([path.with_name(f"{path.name}.pub")] if entry["kind"] == "key" else [])):
        with suppress(FileNotFoundError):
            name.unlink()
    for folder in entry["folders"]:
        with suppress(OSError):  # others have put something there
            Path(folder).rmdir()


def put_interface_back(name: str, saved: Answer) -> None:
    """Take the addresses away that were not there before, and set the MTU that was, if the interface is still there."""
    try:
        now = interface(name)
    except (OSError, subprocess.SubprocessError, ValueError):
        return
    for address in saved["ours"]:
        if address in now["addresses"]:
            try:
                run("ip", "addr", "del", address, "dev", name)
            except ValueError:  # the network's program goes on after its command has ended, and can be first
                if address in interface(name)["addresses"]:
                    raise
    if now["mtu"] != saved["before"]["mtu"]:
        run("ip", "link", "set", name, "mtu", str(saved["before"]["mtu"]))


def interface(name: str) -> Answer:
    """Return an interface's MTU and IPv4 addresses. Raises OSError, SubprocessError or ValueError."""
    (entry,) = json.loads(run("ip", "-j", "addr", "show", "dev", name))
    addresses = [a for a in entry.get("addr_info", ()) if a.get("family") == "inet"]
    return {"mtu": entry["mtu"], "addresses": [f"{a['local']}/{a['prefixlen']}" for a in addresses]}


def run(*argv: str) -> str:
    """Return what a program prints. Raises OSError, or ValueError with what it said."""
    result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PROGRAM_SECONDS)
    if result.returncode:
        output = " ".join((result.stderr or result.stdout).split())[-500:]
        raise ValueError(f"{' '.join(argv)}: {output or f'it ended with code {result.returncode}'}")
    return result.stdout


def target(root: Path, path: str) -> Path:
    """Return where a path is below `root`, behind links of the file itself."""
    return Path(os.path.realpath(root / path.lstrip("/")))


def existing(path: Path) -> Answer | None:
    """Return a file's bytes, mode and owner; None if there is none."""
    try:
        status = path.stat()
        return {
            "data": path.read_bytes(),
            "mode": status.st_mode & 0o7777,
            "user": status.st_uid,
            "group": status.st_gid,
        }
    except FileNotFoundError:
        return None


def write(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Write a file beside its place, sync it and rename it there. It belongs to who had it, else to the folder's."""
    make_folder(path.parent)
    if owner is None:
        status = (path if path.exists() else path.parent).stat()
        owner = status.st_uid, status.st_gid
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".sparkforge-tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    for left in path.parent.glob(f".{path.name}.*.sparkforge-tmp"):  # of one that was killed; the record is locked
        with suppress(OSError):
            left.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, for who owns the one that is there; a new one is that owner's alone."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    status = folder.parent.stat()
    folder.mkdir(mode=0o700)
    os.chown(folder, status.st_uid, status.st_gid)


def read_record(root: Path) -> Answer | None:
    """Return the record; None if there is none. Raises ValueError for one that is none of ours."""
    file = existing(root / RECORD)
    if file is None:
        return None
    record = json.loads(file["data"])
    if not isinstance(record, dict) or not {"state", "entries", "kernel", "interfaces"} <= record.keys():
        raise ValueError(f"{root / RECORD} is no record of ours")
    return record


def write_record(root: Path, record: Answer) -> None:
    """Write the record; it holds what was in the files, so only root reads it."""
    write(root / RECORD, json.dumps(record, indent=1).encode(), 0o600)


@contextmanager
def locked(record: Path) -> Any:
    """Hold the lock beside the record. Raises ValueError if another one does."""
    make_folder(record.parent)
    with record.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("another setup changes this node now") from None
        yield


MODES = {"look": look, "differ": differ, "apply": apply, "restore": restore}


def main(argument: str) -> None:
    """Print the answer to one argument; an error is an answer too."""
    options = json.loads(argument)
    options.setdefault("root", "/")
    try:
        answer = MODES[options["mode"]](options)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
