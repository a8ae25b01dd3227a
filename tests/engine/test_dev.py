"""The development image: starts, sees a mounted checkout, says what must be compiled again."""

import time

import pytest

DEV = ("docker-compose.yml", "docker-compose.dev.yml", "docker-compose.dev.cpu.yml", "tests/engine/ci-dev.yml")


@pytest.fixture(scope="module")
def dev(engine, project, tmp_path_factory):
    checkout = tmp_path_factory.mktemp("vllm")
    (checkout / "vllm").mkdir()
    (checkout / "csrc").mkdir()
    (checkout / "vllm/__init__.py").write_text("here = 'the checkout'\n")
    (checkout / "csrc/a.cu").write_text("one")
    for folder in (checkout, checkout / "vllm"):
        folder.chmod(0o777)
    empty = tmp_path_factory.mktemp("flashinfer")
    empty.chmod(0o755)
    env = {**project.env, "VLLM_SRC": str(checkout), "FLASHINFER_SRC": str(empty)}
    made = type(project)(engine, DEV, env)
    made.compose("build", "dev")
    made.compose("up", "--detach", "--no-build", "dev")
    made.checkout = checkout
    yield made
    made.compose("down", "--volumes", "--timeout", "5", check=False)


def told(dev, text, seconds=120):
    """Wait until the log holds `text`; return the log."""
    end = time.monotonic() + seconds
    while text not in (log := dev.logs("dev")) and time.monotonic() < end:
        time.sleep(0.5)
    return log


def test_the_mounted_checkout_is_what_python_imports(dev):
    told(dev, "serves")
    found = dev.compose("exec", "-T", "dev", "/opt/venv/bin/python", "-c", "import vllm; print(vllm.here)")
    assert found.strip() == "the checkout"


def test_its_log_begins_with_what_serves(dev):
    log = told(dev, "flashinfer: no checkout")
    assert "vllm: /src/vllm serves" in log
    assert "flashinfer: no checkout" in log


def test_a_changed_native_source_is_noticed_at_the_next_start(dev):
    (dev.checkout / "csrc/a.cu").write_text("two")
    dev.compose("restart", "--timeout", "1", "dev")
    change = "1 native sources changed, such as csrc/a.cu"
    assert change in told(dev, change)


def test_debuggers_and_compilers_are_there(dev):
    found = dev.compose(
        "exec", "-T", "dev", "sh", "-c", "gdb --version | head -1; g++ --version | head -1; git --version"
    )
    assert found.count("\n") == 3
    dev.compose("exec", "-T", "dev", "/opt/venv/bin/python", "-c", "import debugpy")
