"""What each image is made from is in pins.toml, whose names must be known elsewhere; and who serves which stack."""

import os

import pytest
from expected import refused

from lab import debian
from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.vllm import targets
from sparkforge.core.errors import UsageError
from sparkforge.image import devices
from sparkforge.pins import locks

TABLE = pins.load()
IMAGES = [name for name, stack in TABLE.stacks.items() if stack.image]


@pytest.mark.parametrize("stack", IMAGES)
def test_what_an_image_names_is_there(stack):
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
        assert targets.load(TABLE.component(stack, "vllm").version).mapped(image.architecture)


def test_each_device_has_a_stack_that_it_can_serve():
    assert devices.stack_of("docker") == TABLE.default
    assert TABLE.image(devices.stack_of("docker-cpu")).device == "cpu"
    assert devices.stack_of("embedded") in TABLE.environments
    assert devices.stack_of("docker", "embedded") == "embedded"


@pytest.mark.parametrize(
    ("device", "stack", "why"),
    [("embedded", "spark", "no CPU build"), ("docker-cpu", "spark", "needs a GPU")],
)
def test_a_device_refuses_a_stack_that_it_cannot_serve_and_names_the_one_that_can(device, stack, why):
    with pytest.raises(UsageError, match=why) as caught:
        devices.stack_of(device, stack)
    assert caught.value.fix.endswith(f"./inv up --device docker --stack {stack}")


@pytest.mark.parametrize(("platform", "machine"), [("linux/arm64", "aarch64"), ("", os.uname().machine)])
def test_a_platform_names_a_machine(platform, machine):
    assert devices.machine_of(platform) == machine


@pytest.mark.parametrize("platform", ["arm64", "windows/arm64", "linux/riscv64", "linux/"])
def test_another_platform_is_refused(platform):
    with pytest.raises(UsageError, match="linux/amd64 and linux/arm64 · --platform linux/arm64"):
        devices.machine_of(platform)
