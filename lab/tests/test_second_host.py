"""The second host of two-GPU measurements: needs root and network namespaces."""

import subprocess
from pathlib import Path

import pytest

from lab.served.second_host import second_host


def test_a_second_host_sees_its_own_interfaces_alone_and_leaves_none():
    try:
        with second_host() as host:
            command = [*host.inside, "ls", "/sys/class/net", "/sys/devices/virtual/net"]
            seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            inside, outside = host.interfaces[1], host.interfaces[0]
            assert (seen.count(inside), seen.count(outside)) == (2, 0)
    except OSError as error:
        pytest.skip(str(error))
    assert not Path("/sys/class/net", outside).exists()
