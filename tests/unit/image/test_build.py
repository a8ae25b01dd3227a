"""Building through Compose: the arguments, the commit, and the hashes in an image."""

import json
import os

import pytest
from expected import refused
from programs import write_program

from lab import debian
from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.core import paths
from sparkforge.core.console import Steps
from sparkforge.core.process import run
from sparkforge.image import build as image
from sparkforge.image import devices
from sparkforge.image.build import ImageOptions
from sparkforge.pins import locks

WORDS = ["compose", "--progress", "plain", "build"]


@pytest.fixture
def docker(tmp_path, monkeypatch):
    def docker(lines):
        write_program(tmp_path / "bin/docker", f'printf "%s\\n" "$@" "$SPARKFORGE_STACK" > {tmp_path}/called\n{lines}')
        monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
        return lambda: (tmp_path / "called").read_text().split()

    return docker


def test_vllms_origin_jobs_and_commit_are_build_arguments(docker):
    called = docker("echo '#7 [runtime 1/2] COPY x'")
    log = image.build(WORDS, "embedded", ImageOptions("source", "3"), Steps(1))
    arguments = {"VLLM_FROM": "source", "JOBS": "3", **image.commit()}
    flags = [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
    assert called() == [*WORDS, *flags, "vllm", "embedded"]
    assert "COPY x" in log.read_text()
    assert log == paths.state() / "logs" / "image.log"


@pytest.mark.parametrize(
    ("place", "argument"),
    [("a/packs", ""), ("lab.example/packs", "lab.example/packs"), ("p.tar", "/mnt/packs/pack.tar")],
)
def test_packs_go_into_the_build_as_a_folder_or_by_the_name_of_a_repository(docker, tmp_path, place, argument):
    called = docker("")
    (tmp_path / "p.tar").write_bytes(b"pack")
    local = place.endswith((".tar", "a/packs"))
    image.build(WORDS, "embedded", ImageOptions(packs=str(tmp_path / place) if local else place))
    words = called()
    assert (f"KERNEL_PACKS={argument}" in words) == bool(argument)
    override = paths.state() / "build.compose.json"
    assert ("--file" in words and words[words.index("build") - 1] == str(override)) == local
    if local:
        folder = json.loads(override.read_text())["services"]["vllm"]["build"]["additional_contexts"]["packs"]
        assert folder == str(tmp_path / place) if not argument else os.listdir(folder) == ["pack.tar"]


PROJECT = {"image": "sparkforge/vllm:spark", "environment": {"SPARKFORGE_STACK": "spark"}, "ports": [{"published": 1}]}
ENGINE = f"""case "$*" in
*inspect*) echo 'Platforms: linux/amd64*, linux/arm64';;
*config*) echo '{json.dumps({"services": {"vllm": PROJECT}})}';;
esac"""


def test_an_image_for_another_platform_has_a_name_of_its_own(docker, capsys):
    called = docker(ENGINE)
    image.build(WORDS, "spark", ImageOptions(platform="linux/arm64"))
    override = paths.state() / "build.compose.json"
    assert called()[: len(WORDS) + 2] == [*WORDS[:-1], "--file", str(override), "build"]
    service = {"image": "sparkforge/vllm:spark-arm64", "build": {"platforms": ["linux/arm64"]}}
    assert json.loads(override.read_text()) == {"services": {"vllm": service}}
    assert "./inv image.publish REPOSITORY --image sparkforge/vllm:spark-arm64" in capsys.readouterr().err


def test_a_reproducible_image_is_built_into_an_archive_with_the_commits_times_and_loaded(docker, tmp_path, capsys):
    state = paths.state()
    archive, project = state / "build.image.tar", state / "build.resolved.yaml"
    docker(f"""echo "$*" >> {tmp_path}/calls
{ENGINE}
case "$*" in
*bake*) test "$BUILDX_BAKE_ENTITLEMENTS_FS" = 0 && grep -q {PROJECT["image"]} {project} && echo archive > {archive};;
*load*) grep -q archive {archive};;
esac""")
    image.build(WORDS, "spark", ImageOptions(jobs="3", platform="linux/arm64", reproducible=True))
    config, bake, load = (tmp_path / "calls").read_text().splitlines()[-3:]
    override = state / "build.compose.json"
    assert config == f"{' '.join(WORDS[:-1])} --file {override} config --format json"
    assert json.loads(override.read_text())["services"]["vllm"]["build"]["platforms"] == ["linux/arm64"]
    arguments = {"VLLM_FROM": "wheel", "JOBS": "3", **image.commit()}
    settings = [f"--set vllm.args.{name}={value}" for name, value in arguments.items()]
    settings += [f"--set vllm.output=type=oci,dest={archive},{image.REWRITTEN}"]
    assert bake == f"buildx bake --progress plain --provenance=false --file {project} {' '.join(settings)} vllm"
    assert load == f"image load --input {archive}"
    assert not archive.exists()
    assert "--image sparkforge/vllm:spark-arm64" in capsys.readouterr().err


def test_a_build_that_fails_or_cannot_be_made_is_refused_with_the_next_step(docker):
    called = docker(ENGINE.replace(", linux/arm64", ""))  # this engine runs no program of the other platform
    with refused("engine.failed", "linux/arm64.*qemu-user"):
        image.build(WORDS, "spark", ImageOptions(platform="linux/arm64"))
    assert "build" not in called()
    docker("echo '#9 ERROR: process did not complete: exit code: 54'; exit 1")
    with refused("engine.failed", r"exit code: 54.*image\.log$"):
        image.build(WORDS, "spark")
    with refused("usage", "wheel or source"):
        image.build(WORDS, "spark", ImageOptions("git"))
    other = "linux/amd64" if os.uname().machine == "aarch64" else "linux/arm64"
    with refused("usage", "--from source cannot be combined with --platform"):
        image.build(WORDS, "spark", ImageOptions("source", platform=other))


@pytest.mark.needs("git")
def test_the_commit_is_told_and_changes_are_marked(empty_root):
    assert image.commit() == {}

    (empty_root / "a").write_text("a")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (["init", "--quiet"], ["add", "a"], [*who, "commit", "--quiet", "--message", "a"]):
        run(["git", *arguments], cwd=empty_root, env={"GIT_COMMITTER_DATE": "1000000000 +0000"})
    commit = image.commit()
    assert len(commit["REVISION"]) == 40
    assert commit["SOURCE_DATE_EPOCH"] == "1000000000"
    (empty_root / "a").write_text("b")
    assert image.commit()["REVISION"] == f"{commit['REVISION']}-changed"


TABLE = pins.load()
IMAGES = [name for name, stack in TABLE.stacks.items() if stack.image]


@pytest.mark.parametrize("stack", IMAGES)
def test_everything_that_an_image_names_exists(stack):
    image = TABLE.image(stack)
    assert {"vllm", "base"} <= TABLE.stack(stack).components.keys()
    assert set(image.locks) <= set(devices.OCI_MACHINES.values())
    assert all(locks.lock_path(image.lock(processor)).is_file() for processor in image.locks)
    with refused("input.pins", "not made for riscv64"):
        image.lock("riscv64")
    assert (image.device in {entry.device for entry in debian.sets()}) == (image.device in (devices.CPU, devices.CUDA))
    if image.kernels:
        table = sets.load(TABLE.component(stack, "flashinfer").version)
        assert image.kernels in table.sets
        assert f"{stack}/flashinfer" in TABLE.environment(image.environments["kernels"]).wheels
        assert TABLE.environment(image.environments["vllm"])
        assert vllm_sources.load_targets(TABLE.component(stack, "vllm").version).mapped(image.architecture)


def test_each_device_has_a_stack_that_it_can_serve_and_refuses_another():
    assert devices.stack_of("docker") == TABLE.default
    assert TABLE.image(devices.stack_of("docker-cpu")).device == "cpu"
    assert devices.stack_of("embedded") in TABLE.environments
    assert devices.stack_of("docker", "embedded") == "embedded"
    for device, why in (("embedded", "no CPU build"), ("docker-cpu", "needs a GPU")):
        with refused("usage", f"{why}.* --device docker --stack spark"):
            devices.stack_of(device, "spark")


def test_a_platform_names_a_machine():
    assert (devices.machine_of("linux/arm64"), devices.machine_of("")) == ("aarch64", os.uname().machine)
    for platform in ("arm64", "windows/arm64", "linux/riscv64", "linux/"):
        with refused("usage", "linux/amd64, linux/arm64 · --platform linux/arm64"):
            devices.machine_of(platform)
