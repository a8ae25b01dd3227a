"""Facts about the machine: ports, limits, directories, arguments."""

import socket
from functools import partial

import pytest
from programs import write_files

from validate.facts import machine
from validate.facts.fact import take


def fact(name, target):
    return take(next(reading for reading in machine.READINGS if reading.name == name), target)


def test_port_that_somebody_listens_on_is_not_free(target):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert fact("serve.port_free", target(port=port)).value is False
    assert fact("serve.port_free", target(port=port)).value is True


def test_serve_args_are_read_as_vllm_would_and_api_keys_stay_out_of_the_facts(target):
    for args, port, share in (
        ((), 8000, 0.92), (("--port=9", "--gpu-memory-utilization=0.5"), 9, 0.5),
        (("--port", "9", "--port", "10"), 10, 0.92), (("--gpu_memory_utilization", "0.7"), 8000, 0.7),
    ):  # fmt: skip
        validated = target(serve_args=args)
        assert fact("serve.port", validated).value == port
        assert fact("serve.port", target(serve_args=args, port=7)).value == 7
        assert fact("serve.gpu_memory_utilization", validated).value == share
    validated = target(serve_args=("--api-key", "s3cret", "--api-key=s3cret", "--x"))
    assert fact("serve.args", validated).value == ["--api-key", "***", "--api-key=***", "--x"]


@pytest.mark.parametrize(
    ("name", "variable", "values"),
    [("python.optimize", "PYTHONOPTIMIZE", {"": 0, "0": 0, "2": 2, "yes": 1}),
     ("memory.guard_gib", "SPARKFORGE_GUARD_GIB", {"": 3.0, "7.5": 7.5, "0": 3.0})],
)  # fmt: skip
def test_settings_of_the_environment_are_facts(target, name, variable, values):
    assert {text: fact(name, target(environ={variable: text})).value for text in values} == values


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    return partial(write_files, tmp_path)


def test_the_room_below_a_groups_limit_is_a_fact(target, root):
    group = "sys/fs/cgroup/memory"
    root({"proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "proc/self/cgroup": "0::/",
          "proc/meminfo": "MemAvailable: 8388608 kB", f"{group}.current": "900000000"})  # fmt: skip
    for limit, room in (("1073741824", 173741824), ("max", None), ("800000000", 0)):
        root({f"{group}.max": limit})
        assert fact("memory.cgroup_headroom_bytes", target()).value == room


def test_cache_directory_follows_vllms_rule(target, tmp_path):
    for env, wanted in (
        ({"HOME": "/h"}, "/h/.cache/vllm"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/vllm"),
        ({"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": str(tmp_path / "new" / "dir")}, str(tmp_path / "new" / "dir")),
    ):
        validated = target(environ=env)
        assert fact("disk.cache_directory", validated).value == wanted
        assert fact("disk.cache_free_bytes", validated).value > 0


SEAT, CONF = {"run/systemd/seats/x": ""}, "etc/systemd/logind.conf"


@pytest.mark.parametrize(
    ("files", "removed"),
    [
        ({}, False),  # no logind, as in a container
        (SEAT, True),  # logind's default
        ({**SEAT, CONF: "[Login]\nRemoveIPC=no\n"}, False),
        # The drop-in file in /etc replaces the one of the same name in /usr/lib.
        ({**SEAT, "usr/lib/systemd/logind.conf.d/5.conf": "RemoveIPC=no", f"{CONF}.d/5.conf": "RemoveIPC=yes"}, True),
        ({**SEAT, "var/lib/systemd/linger/4711": ""}, False),
    ],
)
def test_whether_a_logout_deletes_shared_memory(target, monkeypatch, root, files, removed):
    root(files)
    # logind keeps the shared memory of system users.
    for uid, own, expected in ((4711, "", removed), (4711, "1", False), (100, "", False)):
        monkeypatch.setattr("os.getuid", lambda uid=uid: uid)
        monkeypatch.setenv("SPARKFORGE_OWN_SHM", own)
        assert fact("os.remove_ipc", target()).value is expected
