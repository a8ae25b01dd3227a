"""Facts about the machine: ports, limits, directories, arguments."""

import socket

import pytest

from validate import machine
from validate.facts import take


def fact(name, scene):
    return take(next(reading for reading in machine.READINGS if reading.name == name), scene)


def test_port_that_somebody_listens_on_is_not_free(scene):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert fact("serve.port_free", scene(port=port)).value is False
    assert fact("serve.port_free", scene(port=port)).value is True


@pytest.mark.parametrize("port", [-1, 70000])
def test_port_that_is_none_is_unknown(scene, port):
    assert fact("serve.port_free", scene(port=port)).error


@pytest.mark.parametrize(
    ("args", "port", "share"),
    [
        ((), 8000, 0.92),
        (("--port", "9"), 9, 0.92),
        (("--port=9", "--gpu-memory-utilization=0.5"), 9, 0.5),
        (("--port", "9", "--port", "10"), 10, 0.92),
        (("--gpu_memory_utilization", "0.7"), 8000, 0.7),
    ],
)
def test_serve_args_are_read_as_vllm_would(scene, args, port, share):
    made = scene(serve_args=args)
    assert fact("serve.port", made).value == port
    assert fact("serve.gpu_memory_utilization", made).value == share


def test_an_option_goes_before_serve_args(scene):
    made = scene(serve_args=("--port", "9"), port=10)
    assert fact("serve.port", made).value == 10


def test_port_that_is_no_number_is_unknown(scene):
    assert "invalid literal" in fact("serve.port", scene(serve_args=("--port", "x"))).error


def test_api_keys_stay_out_of_the_facts(scene):
    made = scene(serve_args=("--api-key", "s3cret", "--api-key=s3cret", "--x"))
    assert fact("serve.args", made).value == ["--api-key", "***", "--api-key=***", "--x"]


@pytest.mark.parametrize(("told", "level"), [("", 0), ("0", 0), ("1", 1), ("2", 2), ("yes", 1)])
def test_python_optimize_reads_the_environment(scene, told, level):
    assert fact("python.optimize", scene(environ={"PYTHONOPTIMIZE": told})).value == level


V2 = {"memory.max": "1073741824", "memory.current": "900000000", "memory.stat": "anon 1\ninactive_file 400000000\n"}
V1 = {
    "memory/memory.limit_in_bytes": "1073741824",
    "memory/memory.usage_in_bytes": "900000000",
    "memory/memory.stat": "cache 5\ninactive_file 1\ntotal_inactive_file 400000000\n",
}


@pytest.mark.parametrize(
    ("files", "headroom"),
    [
        (V2, 573741824),
        (V1, 573741824),
        ({**V2, "memory.max": "max"}, None),
        ({}, None),
        ({**V1, "memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({**V2, "memory.current": "9073741824"}, 0),
    ],
)
def test_container_limit(scene, tmp_path, monkeypatch, files, headroom):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    found = fact("memory.cgroup_headroom_bytes", scene())
    assert (found.value, found.error) == (headroom, None)
    assert fact("memory.available_bytes", scene()).value == 8 << 30


def test_unreadable_meminfo_is_an_unknown_fact(scene, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "gone")
    found = fact("memory.total_bytes", scene())
    assert found.value is None
    assert "No such file" in found.error


def test_cache_directory_follows_vllms_rule(scene, tmp_path):
    for env, wanted in (
        ({"HOME": "/h"}, "/h/.cache/vllm"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/vllm"),
        ({"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": str(tmp_path / "new" / "dir")}, str(tmp_path / "new" / "dir")),
    ):
        made = scene(environ=env)
        assert fact("disk.cache_directory", made).value == wanted
        assert fact("disk.cache_free_bytes", made).value > 0
