"""The choice of a device and its reason."""

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.serve.devices import choose as device
from sparkforge.serve.devices.choose import choose


@pytest.fixture
def spark(monkeypatch, tmp_path):
    """This machine pretends to be a Spark: aarch64 with a driver."""
    (tmp_path / "version").write_text("NVRM version")
    (tmp_path / "product").write_text("NVIDIA_DGX_Spark\n")
    monkeypatch.setattr(device.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(device, "PRODUCT", tmp_path / "product")


def test_a_device_that_is_asked_for_is_taken_and_another_word_refused():
    for name, container in (("embedded", False), ("gpu", False), ("docker", True), ("docker-cpu", True)):
        assert (choose(name).device, choose(name).container) == (name, container)
    with pytest.raises(UsageError, match="auto, embedded, gpu, docker, docker-cpu"):
        choose("tpu")


def test_auto_without_arm_or_driver_is_embedded_and_asks_no_engine(monkeypatch, spark, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", "nonsense")
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path / "none")
    assert choose("auto") == device.Choice("embedded", "no NVIDIA driver is loaded; vLLM's CPU build serves")


def test_auto_on_a_spark_is_docker_if_its_engine_has_the_gpu(spark, fake_engine, monkeypatch, tmp_path):
    choice = choose("auto")
    assert (choice.device, "nvidia-ctk" in choice.why) == ("embedded", True)
    fake_engine.info["Runtimes"]["nvidia"] = {"path": "nvidia-container-runtime"}
    why = "this is {} and Docker 26.1.5+dfsg1 has the GPU by NVIDIA runtime"
    assert choose("auto") == device.Choice("docker", why.format("NVIDIA_DGX_Spark"))
    monkeypatch.setattr(device, "PRODUCT", tmp_path / "none")
    assert choose("auto").why == why.format("an aarch64 machine with an NVIDIA driver")
