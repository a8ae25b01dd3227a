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


@pytest.mark.parametrize("name", ["embedded", "docker", "docker-cpu"])
def test_a_device_that_is_asked_for_is_taken(name):
    assert (choose(name).device, choose(name).container) == (name, name != "embedded")


def test_another_word_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="auto, embedded, docker, docker-cpu"):
        choose("tpu")


def test_auto_without_arm_or_driver_is_embedded_and_asks_no_engine(monkeypatch, spark, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", "nonsense")
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path / "none")
    assert choose("auto") == device.Choice("embedded", "no NVIDIA driver is loaded; vLLM's CPU build serves")
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    assert "this machine is x86_64" in choose("auto").why


def test_auto_on_a_spark_with_a_gpu_in_its_engine_is_docker(spark, fake_engine):
    fake_engine.info["Runtimes"]["nvidia"] = {"path": "nvidia-container-runtime"}
    choice = choose("auto")
    assert choice.device == "docker"
    assert choice.why == "this is NVIDIA_DGX_Spark and Docker 26.1.5+dfsg1 has the GPU by NVIDIA runtime"


def test_auto_on_a_spark_whose_engine_has_no_gpu_says_how_to_give_it(spark, fake_engine):
    choice = choose("auto")
    assert choice.device == "embedded"
    assert "nvidia-ctk" in choice.why


def test_auto_on_a_spark_without_an_engine_says_so(spark, monkeypatch, tmp_path, no_docker):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "no Docker engine is installed" in choose("auto").why


def test_a_machine_without_a_product_name_is_described(spark, fake_engine, monkeypatch, tmp_path):
    fake_engine.info["Runtimes"]["nvidia"] = {}
    monkeypatch.setattr(device, "PRODUCT", tmp_path / "none")
    assert "an aarch64 machine with an NVIDIA driver" in choose("auto").why
