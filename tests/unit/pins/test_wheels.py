"""The files of a lock that a machine gets, from a real package index on loopback."""

import hashlib

import pytest
from expected import refused

from sparkforge.pins import wheels
from sparkforge.pins.wheels import TargetMachine

ARM, INTEL = TargetMachine("aarch64", (3, 12)), TargetMachine("x86_64", (3, 11))
FILES = [
    "thing-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "thing-1-cp312-cp312-manylinux_2_28_aarch64.whl", "thing-1-cp312-cp312-manylinux_2_39_aarch64.whl",
    "thing-1-cp312-cp312-musllinux_1_2_aarch64.whl", "thing-1-cp312-cp312-win_amd64.whl",
    "thing-1-cp38-abi3-manylinux_2_17_aarch64.whl", "thing-1-py3-none-any.whl", "thing-1.tar.gz",
    "thing-0.1-py36+-none-any.whl",
]  # fmt: skip


def sha(name):
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture
def server(monkeypatch, serve):
    def answer(handler):
        names = [name for name in FILES if handler.path == f"/simple/{name.split('-')[0]}/"]
        body = "".join(f'<a href="/f/{name}#sha256={sha(name)}">{name}</a>' for name in names).encode()
        return 200 if names else 404, body, {"Content-Type": "text/html"}

    server = serve(answer)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return server


def lock(tmp_path, *lines):
    path = tmp_path / "set.txt"
    path.write_text("# a comment\n" + "\n".join(lines) + "\n    # via something\n")
    return path


def line(requirement, names=FILES[:-1]):  # no tool locks the last file
    return " \\\n".join([requirement, *(f"    --hash=sha256:{sha(name)}" for name in names)])


def names(picks):
    return [pick.filename for pick in picks]


def test_each_machine_gets_its_best_file_and_the_index_is_asked_once(server, tmp_path):
    path = lock(tmp_path, line("thing==1"))
    for _ in range(2):
        assert names(wheels.picks(path, ARM)) == ["thing-1-cp312-cp312-manylinux_2_28_aarch64.whl"]
        assert names(wheels.picks(path, INTEL)) == [FILES[0]]
        assert names(wheels.picks(path, TargetMachine("riscv64", (3, 12)))) == ["thing-1-py3-none-any.whl"]
    assert len(server.asked) == 3
    assert names(wheels.picks(lock(tmp_path, line("thing==1", FILES[5:8])), ARM)) == [FILES[5]]
    assert names(wheels.picks(lock(tmp_path, line("thing==1", FILES[7:8])), ARM)) == ["thing-1.tar.gz"]


def test_a_lock_without_a_file_for_the_machine_is_an_error(server, tmp_path):
    with refused("input.pins", "thing==1 has no file for cp312-aarch64"):
        wheels.picks(lock(tmp_path, line("thing==1", [FILES[0], FILES[2]])), ARM)
    with refused("network.fetch", "absent"):
        wheels.picks(lock(tmp_path, line("absent==1")), ARM)


@pytest.mark.parametrize(
    ("requirement", "hashes"), [("thing==1", []), ("thing>=1", FILES), ("thing", FILES), ("thing==1.*", FILES)]
)
def test_a_requirement_that_is_not_locked_is_refused(tmp_path, requirement, hashes):
    with refused("input.pins", "thing is not locked"):
        list(wheels.requirements(lock(tmp_path, line(requirement, hashes)).read_text(), ARM))


MARKERS = {
    "platform_machine == 'aarch64'": (True, False),
    "platform_machine != 'aarch64'": (False, True),
    "sys_platform == 'win32'": (False, False),
    "python_version >= '3.12'": (True, False),
    "python_full_version < '3.11.5'": (False, True),
    "python_full_version >= '3.11.5'": (True, True),
    "platform_python_implementation != 'PyPy'": (True, True),
}


@pytest.mark.parametrize("marker", MARKERS)
def test_markers_are_judged_for_the_target_and_not_for_this_machine(tmp_path, marker):
    text = lock(tmp_path, line(f"thing==1 ; {marker}")).read_text()
    assert (bool(list(wheels.requirements(text, ARM))), bool(list(wheels.requirements(text, INTEL)))) == MARKERS[marker]


@pytest.mark.parametrize(
    "requirement", ["thing==", "== 1", "thing==1 ; nonsense == 1", "thing==1 ; os_name", "\x00==1"]
)
def test_a_malformed_lock_is_an_error_of_ours(tmp_path, requirement):
    with refused("input.pins"):
        list(wheels.requirements(line(requirement, FILES), ARM))


@pytest.mark.parametrize("content", ["", "[1]", '[{"package": "x"}]', "{"])
def test_a_damaged_list_of_files_is_asked_for_again(server, tmp_path, content):
    path = lock(tmp_path, line("thing==1", FILES))
    first = wheels.picks(path, ARM)
    (kept,) = (wheels.paths.cache() / "picks").glob("*aarch64*[0-9a-f].json")
    kept.write_text(content)
    assert wheels.picks(path, ARM) == first
