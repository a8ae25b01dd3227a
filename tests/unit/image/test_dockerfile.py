"""The Dockerfile agrees with pins.toml and downloads nothing without a hash."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from programs import write_files, write_program

from lab import debian
from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.core.paths import ROOT

FILES = ("Dockerfile", "Dockerfile.dev")
STACKS = [name for name, stack in pins.load().stacks.items() if stack.image]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTION = re.compile(r"^([A-Z]+)\s+((?:.*\\\n)*.*)$", re.MULTILINE)


def instructions(text):
    """Yield (word, arguments) of a Dockerfile, comments left out, continued lines joined."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for word, rest in INSTRUCTION.findall(plain):
        yield word, rest.replace("\\\n", " ")


def arguments(text):
    return dict(rest.split("=", 1) for word, rest in instructions(text) if word == "ARG" and "=" in rest)


def stages(name):
    """Return stage → base of a Dockerfile."""
    text = (ROOT / name).read_text(encoding="utf-8")
    froms = [rest.split() for word, rest in instructions(text) if word == "FROM"]
    return {fields[-1]: re.sub(r"\$\{(\w+)\}", lambda match: arguments(text)[match[1]], fields[-3]) for fields in froms}


@pytest.mark.parametrize(("name", "stack"), [(name, stack) for name in FILES for stack in STACKS])
def test_each_stack_stands_on_its_base_of_the_pins_and_on_its_device(name, stack):
    base, device = pins.load().component(stack, "base"), pins.load().image(stack).device
    assert stages(name)[f"base-{stack}"] == f"base-{device}"
    assert stages(name)[f"base-{device}"] == f"{base.image}:{base.version}@{base.digest}"
    text = (ROOT / name).read_text(encoding="utf-8").partition(f" AS base-{device}\n")[2].partition("\nFROM ")[0]
    assert f"SPARKFORGE_DEVICE={device}" in text


def test_only_the_stage_with_debians_packages_runs_programs_of_the_image_that_is_built():
    """All other stages run on the building machine's platform, so that no compiler is emulated.

    Their base image and instructions are the same as the image's own.
    """
    texts = re.split(r"^(?=FROM )", TEXT, flags=re.MULTILINE)[1:]
    sections = {re.match(r"FROM .* AS (\S+)", text)[1]: text for text in texts}
    parents = stages("Dockerfile")

    def runs_natively(stage):
        parent = parents[stage]
        return "--platform=$BUILDPLATFORM" in sections[stage] or (parent in sections and runs_natively(parent))

    assert [name for name, text in sections.items() if "\nRUN " in text and not runs_natively(name)] == ["base"]
    for device in ("cuda", "cpu"):
        of_image, of_builder = sections[f"base-{device}"], sections[f"builder-{device}"]
        assert list(instructions(of_image))[1:] == list(instructions(of_builder))[1:]
        assert parents[f"base-{device}"] == parents[f"builder-{device}"]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_taken_without_a_digest_and_installed_but_by_lock(name):
    for image in stages(name).values():
        assert image == "scratch" or image in stages(name) or "@sha256:" in image, image
    text = " ".join(rest for word, rest in instructions((ROOT / name).read_text(encoding="utf-8")) if word == "RUN")
    assert not re.search(r"\b(apt-get|apt|curl|wget|git clone|pip install|uv pip|npm)\b", text)
    assert "sed -i" not in text
    assert not [word for word, rest in instructions(TEXT) if word == "ADD"]


def test_the_health_check_needs_no_site_packages():
    command = [sys.executable, "-S", "-m", "sparkforge.serve.health"]
    result = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert "the validation has not passed" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize("stack", [name for name in STACKS if pins.load().image(name).kernels])
def test_a_server_has_the_variables_that_its_kernels_were_compiled_with(stack):
    image, table = pins.load().image(stack), sets.load(pins.load().component(stack, "flashinfer").version)
    stage = TEXT.partition(f" AS base-{image.device}\n")[2].partition("\nFROM ")[0]
    settings = " ".join(rest for word, rest in instructions(stage) if word == "ENV")
    variables = dict(setting.split("=", 1) for setting in shlex.split(settings))
    wanted = {**table.environment, **table.server, "FLASHINFER_CUDA_ARCH_LIST": image.architecture}
    assert wanted.items() <= variables.items()


def test_with_ca_tells_every_client_only_if_there_is_one(tmp_path):
    script = (ROOT / "deploy/with-ca").read_text(encoding="utf-8")
    secret = tmp_path / "ca"
    secret.write_text("certificate")
    moved = tmp_path / "with-ca"
    moved.write_text(script.replace("/run/secrets/ca", str(secret)))
    output = subprocess.run(["/bin/sh", moved, "env"], capture_output=True, text=True, check=True).stdout
    assert f"PIP_CERT={secret}" in output
    assert f"SSL_CERT_FILE={secret}" in output
    secret.write_text("")
    output = subprocess.run(["/bin/sh", moved, "env"], capture_output=True, text=True, check=True, env={}).stdout
    assert "PIP_CERT" not in output


def test_every_debian_set_is_locked_for_both_machines_with_all_that_was_asked_for():
    for entry in debian.sets():
        for machine in debian.ARCHITECTURES:
            debs = [deb for stage in (*debian.STAGES[entry.stage], entry.stage)
                    for deb in debian.read(debian.LOCKS / f"{entry.device}-{stage}-{machine}.txt")]  # fmt: skip
            names = {Path(deb.path).name.partition("_")[0] for deb in debs}
            assert set(entry.wanted) <= names
            assert all(re.fullmatch(r"[0-9a-f]{64}", deb.sha256) for deb in debs)
            assert all(Path(deb.path).stem.endswith((f"_{machine}", "_all")) for deb in debs)


DEBOOTSTRAP = "deb [signed-by=/k] http://mirror.test/debian x main\n# http://snapshot.test/archive/debian/2025/\n"
OFFICIAL = """Types: deb
# http://snapshot.test/archive/debian/20250520T000000Z
URIs: http://mirror.test/debian
Suites: trixie trixie-updates
"""


@pytest.mark.parametrize("known", ["", OFFICIAL, DEBOOTSTRAP])
def test_a_locked_package_that_cannot_be_brought_stops_the_build_and_says_which(tmp_path, known):
    lock = tmp_path / "lock.txt"
    lock.write_text("# snapshot 20260101T000000Z\n" + "0" * 64 + "  debian/pool/main/t/tini/tini_1_amd64.deb\n")
    helper = write_program(tmp_path / "helper", f'echo "$5" >> {tmp_path}/asked\nexit 1')
    script = (ROOT / "deploy/install-debs").read_text(encoding="utf-8")
    script = script.replace("/usr/lib/apt/apt-helper", str(helper)).replace("/var/cache/debs", str(tmp_path / "debs"))
    archives = {"DEBIAN_MIRROR": "http://mirror.test", "DEBIAN_SNAPSHOT": "http://snapshot.test/archive"}
    if known:
        (tmp_path / "sources").write_text(known)
        script, archives = script.replace("/etc/apt/sources.list ", f"{tmp_path}/sources "), {}
    script = script.replace("/etc/apt/sources.list.d/*", "")
    result = subprocess.run(
        ["/bin/sh", "-c", script, "sh", lock],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], **archives},
    )  # fmt: skip
    assert result.returncode == 1
    assert "tini_1_amd64.deb" in result.stderr
    assert ".venv/bin/python -m lab.debian" in result.stderr
    assert (tmp_path / "asked").read_text().split() == [
        "http://mirror.test/debian/pool/main/t/tini/tini_1_amd64.deb",
        "http://snapshot.test/archive/debian/20260101T000000Z/pool/main/t/tini/tini_1_amd64.deb",
    ]


COMMIT = "0123456789abcdef" * 2 + "01234567"


def described(context, revision=""):
    command = ["sh", ROOT / "deploy/describe-source", context, revision]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"HEAD": "ref: refs/heads/main\n", "refs/heads/main": f"{COMMIT}\n"}, (COMMIT, "git's HEAD")),
        ({"HEAD": "ref: refs/heads/a/b\n", "packed-refs": f"# x\n{'f' * 40} refs/heads/b\n{COMMIT} refs/heads/a/b\n"},
         (COMMIT, "git's HEAD")),
        ({"HEAD": f"{COMMIT}\n"}, (COMMIT, "git's HEAD")),
        ({"HEAD": "ref: refs/heads/unborn\n"}, ("", "nothing")),
        ({"HEAD": 'x", "y": "'}, ("", "nothing")),
        ({}, ("", "nothing")),
    ],
)  # fmt: skip
def test_a_plain_build_knows_its_commit_from_git_in_the_context(tmp_path, files, expected):
    write_files(tmp_path, {"pins.toml": "a", **{f".git/{name}": text for name, text in files.items()}})
    source = described(tmp_path)
    assert (source["revision"], source["from"]) == expected
    argument = described(tmp_path, "abc-changed")
    assert (argument["revision"], argument["from"]) == ("abc-changed", "the build argument")
    assert argument["tree"] == source["tree"]


def test_the_digest_of_the_context_follows_every_file_and_not_git(tmp_path):
    first = described(write_files(tmp_path, {"folder with space/a": "a"}))["tree"]
    write_files(tmp_path, {".git/HEAD": COMMIT})
    assert described(tmp_path)["tree"] == first
    (tmp_path / "folder with space/a").write_text("b")
    assert described(tmp_path)["tree"] != first
