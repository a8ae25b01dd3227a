import pytest

from serve.device import choose
from sparkforge.errors import DeviceError, UsageError


def test_auto_and_embedded_choose_the_embedded_device_and_say_why():
    assert choose("embedded").device == "embedded"
    assert "container path is not built yet" in choose("auto").why


def test_docker_is_refused_until_its_path_is_built():
    with pytest.raises(DeviceError, match="embedded"):
        choose("docker")


def test_another_word_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="auto, embedded and docker"):
        choose("tpu")
