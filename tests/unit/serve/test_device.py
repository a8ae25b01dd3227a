"""The choice of a device and its reason."""

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.image.devices import CONTAINERS
from sparkforge.serve.devices import choose as device
from sparkforge.serve.devices.choose import choose


@pytest.fixture
def spark(tmp_path):
    """The files of a Spark with a driver."""
    for name, text in ((device.NVIDIA_DRIVER, "NVRM version"), (device.PRODUCT, "NVIDIA_DGX_Spark\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_device_that_is_asked_for_is_taken_and_another_word_refused():
    for name, container in (("embedded", False), ("gpu", False), ("docker", True), ("docker-cpu", True)):
        assert (choose(name).device, name in CONTAINERS) == (name, container)
    with pytest.raises(UsageError, match="auto, embedded, gpu, docker, docker-cpu"):
        choose("tpu")


def test_auto_without_a_driver_is_embedded_and_asks_no_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", "nonsense")
    assert choose("auto", tmp_path) == device.Choice("embedded", "no NVIDIA driver is loaded; vLLM's CPU build serves")


def test_auto_on_a_spark_is_docker_if_its_engine_has_the_gpu(spark, fake_engine):
    choice = choose("auto", spark, "aarch64")
    assert (choice.device, "nvidia-ctk" in choice.why) == ("embedded", True)
    fake_engine.info["Runtimes"]["nvidia"] = {"path": "nvidia-container-runtime"}
    why = "this is {} and Docker 26.1.5+dfsg1 has the GPU by NVIDIA runtime"
    assert choose("auto", spark, "aarch64") == device.Choice("docker", why.format("NVIDIA_DGX_Spark"))
    (spark / device.PRODUCT).unlink()
    assert choose("auto", spark, "aarch64").why == why.format("an aarch64 machine with an NVIDIA driver")
