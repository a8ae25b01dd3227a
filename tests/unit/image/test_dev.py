"""How the development image uses mounted checkouts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import advice
import pytest
from programs import write_files, write_program

import tasks
from sparkforge.compile import cache
from sparkforge.core import manifest
from sparkforge.core.errors import UsageError
from sparkforge.core.manifest import Made
from sparkforge.core.paths import ROOT
from sparkforge.image import dev
from sparkforge.patching import series
from sparkforge.patching.series import Queue

VLLM = dev.CHECKOUTS[0]


@pytest.fixture
def folders(tmp_path):
    sources, packages = tmp_path / "src", tmp_path / "site-packages"
    write_files(sources / "vllm", {"vllm/__init__.py": "here = 'checkout'\n", "csrc/a.cu": "one"})
    write_files(packages / "vllm", {"__init__.py": "here = 'installed'\n", "_C.abi3.so": "code"})
    return sources, packages


@pytest.mark.parametrize("broken", [False, True])
def test_installed_natives_are_linked_also_anew_and_own_ones_are_left(folders, broken):
    sources, packages = folders
    native = sources / "vllm/vllm/_C.abi3.so"
    if broken:
        native.symlink_to("/nowhere/_C.abi3.so")  # to a removed image
    assert dev.link_natives(VLLM, packages, sources) == ["_C.abi3.so"]
    assert native.readlink() == packages / "vllm/_C.abi3.so"
    native.unlink()
    native.write_bytes(b"own")
    assert dev.link_natives(VLLM, packages, sources) == []
    assert native.read_bytes() == b"own"


def start_python(packages, code, **environment):
    """Return the words that a new Python prints, which has only the site-packages `packages`."""
    command = [sys.executable, "-I", "-S", "-c", f"import os, site; site.addsitedir({str(packages)!r}); {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


def test_the_checkout_is_imported_instead_of_the_installed_package(folders):
    sources, packages = folders
    for checkouts, imported in (([VLLM], "checkout"), ([], "installed")):
        dev.use(checkouts, packages, sources)
        assert start_python(packages, "import vllm; print(vllm.here)") == [imported]


def test_patches_that_a_checkout_lacks_are_named(kit, folders, tmp_path, monkeypatch, capsys):
    sources, packages = folders
    lines = "".join(f"line {number}\n" for number in range(9))
    patched = lines.replace("line 4", "ours")
    diff = kit.diff(tmp_path / "d", {"vllm/a.py": lines}, {"vllm/a.py": patched})
    queue = Queue.load(kit.write_queue(tmp_path / "vllm-1.0", diff))
    monkeypatch.setattr(series, "queues", lambda table, stack: [(None, queue)])
    advice = "lacks 0001-change-something.patch: on the host, .venv/bin/python -m lab.patches into CHECKOUT"
    for content, advised in ((lines, True), ("moved\n" + lines, True), (patched, False), (f"edited\n{patched}", False)):
        (sources / "vllm/vllm/a.py").write_text(content)
        dev.check_mounted(packages, "spark", sources)
        assert (advice in capsys.readouterr().err) is advised


@pytest.mark.needs("git")
def test_built_files_are_linked_and_deleted_links_stay_away(folders):
    sources, packages = folders
    checkout = sources / "vllm"
    ignored = "/vllm/_version.py\nvllm/third_party/kernels/*\n*.so\n"
    (checkout / ".gitignore").write_text(ignored)
    built = ("_version.py", "deleted.py", "third_party/kernels/a.py", "third_party/kernels/deep/b.py")
    write_files(packages / "vllm", {path: path for path in built})
    linked = dev.link_natives(VLLM, packages, sources)
    assert linked == ["_C.abi3.so", "_version.py", "third_party/kernels/a.py", "third_party/kernels/deep"]
    assert not (checkout / "vllm/deleted.py").exists()
    assert (checkout / "vllm/third_party/kernels/deep/b.py").read_text() == "third_party/kernels/deep/b.py"
    assert dev.link_natives(VLLM, packages, sources) == []


@pytest.mark.needs("git")
def test_flashinfer_compiles_the_checkouts_own_sources(tmp_path):
    sources, packages = tmp_path / "src", tmp_path / "site-packages"
    checkout, flashinfer = sources / "flashinfer", dev.named("flashinfer")
    ignored = "flashinfer/_build_meta.py\nflashinfer/data/\n"
    write_files(checkout, {"flashinfer/__init__.py": "own", "csrc/a.cu": "own", ".gitignore": ignored})
    (checkout / "3rdparty/cutlass").mkdir(parents=True)  # a submodule that was not fetched
    installed = ("__init__.py", "_build_meta.py", "data/csrc/a.cu", "data/cutlass/c.h")
    write_files(packages / "flashinfer", dict.fromkeys(installed, "installed"))
    dev.link_natives(flashinfer, packages, sources)
    read = {path: (checkout / "flashinfer" / path).read_text() for path in ("data/csrc/a.cu", "data/cutlass/c.h")}
    assert read == {"data/csrc/a.cu": "own", "data/cutlass/c.h": "installed"}
    assert (checkout / "flashinfer/_build_meta.py").read_text() == "installed"


def test_a_persons_own_build_gets_the_planners_number_of_jobs_and_changed_sources_are_named(folders, capsys):
    sources, packages = folders
    dev.check_mounted(packages, "spark", sources)
    (jobs,) = re.findall(r"MAX_JOBS and CMAKE_BUILD_PARALLEL_LEVEL are (\d+)", capsys.readouterr().err)
    code = f"print(*(os.environ[name] for name in {dev.JOBS!r}))"
    assert start_python(packages, code) == [jobs, jobs]
    assert start_python(packages, code, MAX_JOBS="700") == ["700", jobs]
    (sources / "vllm/csrc/a.cu").write_text("two")
    for _ in range(2):  # until a build accepts the change
        dev.check_mounted(packages, "spark", sources)
        assert "1 native sources changed, such as csrc/a.cu: ./inv dev.build vllm\n" in capsys.readouterr().err


def test_ninja_runs_as_many_jobs_as_fit(tmp_path):
    write_program(tmp_path / "ninja", 'echo "$@"')
    env = {**os.environ, "SPARKFORGE_NINJA": str(tmp_path / "ninja"), "MAX_JOBS": "2"}
    for arguments, expected in (("all", "all -j 2"), ("-j 20", "-j 20 -j 2"), ("-C x -j 2", "-C x -j 2")):
        command = [ROOT / "deploy/dev-bin/ninja", *arguments.split()]
        assert subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.strip() == expected


# ./inv dev.build


@pytest.fixture
def tree(folders, tmp_path):
    (tmp_path / "venv/lib/python3.13").mkdir(parents=True)
    (tmp_path / "venv/lib/python3.13/site-packages").symlink_to(folders[1])
    return tmp_path / "venv"


@pytest.fixture
def asked(monkeypatch):
    """The requests to the compilers, which are replaced; an overlay of vLLM has one library."""
    requests = []

    def make(folder):
        write_files(folder, {"vllm/_C.abi3.so": "new code"})
        return Made({"vllm/_C.abi3.so": "0" * 64})

    def build_extensions(request):
        requests.append(request)
        manifest.once(Path(request.output), "vllm", {"a": "1"}, make)
        return Path(request.output), True

    monkeypatch.setattr(dev, "build_extensions", build_extensions)
    monkeypatch.setattr(dev, "build_kernels", requests.append)
    return requests


def test_vllm_is_compiled_from_the_checkout_into_it(folders, tree, asked, capsys):
    sources, packages = folders
    dev.link_natives(VLLM, packages, sources)
    dev.changed(VLLM, sources)
    (sources / "vllm/csrc/a.cu").write_text("two")
    dev.build("vllm", "spark", dev.BuildOptions(jobs="3"), tree=tree, sources=sources)
    (request,) = asked
    assert (request.checkout, request.jobs, request.stack) == (str(sources / "vllm"), "3", "spark")
    assert request.python == str(tree / "bin/python")
    assert (sources / "vllm/vllm/_C.abi3.so").read_bytes() == b"new code"
    assert (packages / "vllm/_C.abi3.so").read_bytes() == b"code", "the installed file is not written through the link"
    assert dev.changed(VLLM, sources) == []
    assert f"{sources}/vllm/vllm/_C.abi3.so: compiled here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("units", "patterns"), [("changed", ("csrc/a.cu",)), ("csrc/*.cu,csrc/b.cpp", ("csrc/*.cu", "csrc/b.cpp"))]
)
def test_compiling_single_units_does_not_accept_changes(folders, tree, asked, capsys, units, patterns):
    sources, _ = folders
    assert dev.changed(VLLM, sources) == []  # the first call accepts them
    for name in ("a.cu", "a.cuh"):
        (sources / "vllm/csrc" / name).write_text("two")
    dev.build("vllm", "spark", dev.BuildOptions(units=units), tree=tree, sources=sources)
    assert [(request.checkout, request.units) for request in asked] == [(str(sources / "vllm"), patterns)]
    dev.build("vllm", "spark", dev.BuildOptions(targets="spinloop"), tree=tree, sources=sources)  # only a part
    assert dev.changed(VLLM, sources) == ["csrc/a.cu", "csrc/a.cuh"]
    assert "nothing was linked" in capsys.readouterr().err
    dev.accept(VLLM, dev.fingerprints(VLLM, sources))
    with pytest.raises(UsageError, match="there is no edited unit"):
        dev.build("vllm", "spark", dev.BuildOptions(units="changed"), tree=tree, sources=sources)


def test_flashinfer_is_compiled_into_the_cache_that_servers_read(folders, tree, asked, tmp_path, monkeypatch):
    checkout = write_files(folders[0] / "flashinfer", {"flashinfer/__init__.py": ""})
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "volume"))
    dev.build("flashinfer", "spark", dev.BuildOptions(set_name="gpt-oss"), tree=tree, sources=folders[0])
    (output,) = asked
    assert (output.checkout, output.set_name, output.output) == (str(checkout), "gpt-oss", str(tmp_path / "volume"))
    assert cache.default_root().is_relative_to(output.output)


@pytest.mark.parametrize(
    ("name", "stack", "options", "reason"),
    [("vlm", "spark", {}, "there is no checkout 'vlm'"),
     ("flashinfer", "spark", {}, "there is no checkout of flashinfer"),
     ("vllm", "embedded", {}, "the stack embedded compiles nothing"),
     ("flashinfer", "spark", {"set_name": "gpt-os"}, "there is no set gpt-os"),
     ("flashinfer", "spark", {"targets": "_C"}, "--targets has no meaning for flashinfer"),
     ("vllm", "spark", {"set_name": "gpt-oss"}, "--set has no meaning for vllm")],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_the_next_command(folders, name, stack, options, reason):
    with pytest.raises(UsageError, match=reason):
        dev.build(name, stack, dev.BuildOptions(**options), sources=folders[0])


def test_every_advised_command_exists_with_its_options():
    contexts = {name: context for context in tasks.namespace.to_contexts() for name in (context.name, *context.aliases)}
    commands = advice.commands()
    assert {"sparkforge/image/dev.py", "docker-compose.dev.yml", advice.PAGE} <= {command.file for command in commands}
    unknown = [command for command in commands if command.command not in contexts]
    assert unknown == []
    wrong = [command for command in commands if not {*command.options} <= {*contexts[command.command].flags, "--help"}]
    assert wrong == []
