# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Platform.is_blackwell_class(): the generation of a GPU, not a kernel family.

GPU-free: the platform and its compute capability are made up.
"""

import pytest

from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum


def make_platform(enum: PlatformEnum, capability: tuple[int, int] | None):
    class FakePlatform(Platform):
        _enum = enum

        @classmethod
        def get_device_capability(cls, device_id: int = 0):
            return DeviceCapability(*capability) if capability else None

    return FakePlatform


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), False),  # A100
        ((8, 9), False),  # L40S
        ((9, 0), False),  # H100
        ((10, 0), True),  # B200
        ((10, 3), True),  # B300
        ((11, 0), True),  # Thor
        ((12, 0), True),  # RTX PRO 6000, RTX 50
        ((12, 1), True),  # GB10 (DGX Spark)
        (None, False),  # no device
    ],
)
def test_cuda(capability: tuple[int, int] | None, expected: bool):
    platform = make_platform(PlatformEnum.CUDA, capability)
    assert platform.is_blackwell_class() is expected


@pytest.mark.parametrize("enum", [PlatformEnum.ROCM, PlatformEnum.CPU])
def test_other_platforms_are_never_blackwell(enum: PlatformEnum):
    # ROCm reports the gfx major version as the capability: RDNA 4 is (12, 0).
    assert make_platform(enum, (12, 0)).is_blackwell_class() is False


@pytest.mark.parametrize("capability", [(11, 0), (12, 0), (12, 1)])
def test_it_does_not_stand_in_for_family_100(capability: tuple[int, int]):
    """11.x and 12.x are Blackwell, and have no code of family 100."""
    platform = make_platform(PlatformEnum.CUDA, capability)
    assert platform.is_blackwell_class()
    assert not platform.is_device_capability_family(100)
