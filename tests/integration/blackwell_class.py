"""Ask Platform.is_blackwell_class() about made-up devices; run as a program inside the tree under test.

Reads [["CUDA" | "ROCM", [major, minor] | null], …] from stdin and prints one [is_blackwell_class, is family 100] each,
or null where the method does not exist.
"""

import json
import sys

from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum


def judge(kind, capability):
    class Device(Platform):
        _enum = PlatformEnum[kind]

        @classmethod
        def get_device_capability(cls, device_id=0):  # noqa: ARG003
            return DeviceCapability(*capability) if capability else None

    if not hasattr(Device, "is_blackwell_class"):
        return None
    return [Device.is_blackwell_class(), Device.is_device_capability_family(100)]


print(json.dumps([judge(*device) for device in json.load(sys.stdin)]))
