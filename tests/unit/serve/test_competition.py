"""`./inv up` by the gpt-oss competition's variables: MODEL, PORT, TP, MAX_MODEL_LEN."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkforge.cli import program
from sparkforge.core import gpus, paths
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.vllm_flags import flag_value
from sparkforge.image import devices
from sparkforge.image.devices import EMBEDDED
from sparkforge.models import local
from sparkforge.serve import entrypoint, launch, screen, settings
from sparkforge.serve.devices import container, embedded, in_environment
from sparkforge.serve.devices import device as start
from sparkforge.serve.devices.gpu import Gpu
from sparkforge.serve.plan import StartPlan

IMAGE = {"SPARKFORGE_PROFILE": "spark", "SPARKFORGE_MODEL": "/models/gpt-oss-120b", "SPARKFORGE_STACK": "spark"}


def test_the_containers_variables_become_arguments_behind_the_profiles():
    read = settings.read({**IMAGE, "SPARKFORGE_TP": "2", "SPARKFORGE_MAX_MODEL_LEN": "16384"})
    server = entrypoint.plan(read, entrypoint.read_arguments(["--max-num-seqs=3"]))
    assert server.extra_arguments == ("--tensor-parallel-size=2", "--max-model-len=16384", "--max-num-seqs=3")
    assert flag_value(server.arguments, "--max-model-len") == "16384"
    assert settings.read({**IMAGE, "SPARKFORGE_TP": ""}).arguments == ()


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "9" * 5000, "\u0663"])
@pytest.mark.parametrize("name", ["TP", "MAX_MODEL_LEN"])
def test_a_number_that_is_none_is_refused(name, text):
    with pytest.raises(UsageError, match=f"SPARKFORGE_{name} is") as caught:
        settings.read({**IMAGE, f"SPARKFORGE_{name}": text})
    assert len(caught.value.what) < 100


def test_a_repository_is_the_folder_that_was_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(local, "MOUNTED", tmp_path / "nobody/.cache/huggingface")
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert settings.checkpoint("", "") == ""
    assert settings.checkpoint("mine", str(tmp_path / "mine")) == str(tmp_path / "mine")
    with pytest.raises(InputError, check=lambda error: error.code == "input.model") as caught:
        settings.checkpoint("openai/gpt-oss-120b", "/nowhere/openai/gpt-oss-120b")
    assert caught.value.fix.startswith("./inv model.fetch openai/gpt-oss-120b")
    (tmp_path / "models/gpt-oss-120b").mkdir(parents=True)
    (tmp_path / "models/gpt-oss-120b/config.json").write_text("{}")
    fetched = settings.checkpoint("openai/gpt-oss-120b", "/nowhere/openai/gpt-oss-120b")
    assert fetched == str(tmp_path / "models/gpt-oss-120b")


def test_the_embedded_device_takes_a_length_and_no_gpus():
    assert embedded.vllm_arguments({"MAX_MODEL_LEN": "512", "TP": "1"}) == ("--max-model-len=512",)
    assert embedded.vllm_arguments({}) == ()
    with pytest.raises(UsageError, match="TP=8 has no meaning here"):
        embedded.vllm_arguments({"TP": "8"})
    model = Path("/m")
    plan = StartPlan(EMBEDDED, model_id="m", flags=("--max-model-len=512",))
    launch = embedded.Embedded(plan, Path("/python"), model).launch()
    assert flag_value(launch.command, "--max-model-len") == "512"


@pytest.mark.parametrize(("tp", "refused"), [("", False), ("1", False), ("2", False), ("8", True)])
def test_more_gpus_than_the_machine_has_are_refused(monkeypatch, tp, refused):
    monkeypatch.setenv("TP", tp)
    monkeypatch.setattr(gpus, "query", lambda *_fields, **_options: [{}, {}])
    if refused:
        with pytest.raises(UsageError, match="TP=8 is too many"):
            container.variables(StartPlan("docker"))
        with pytest.raises(UsageError, match="TP=8 is too many"):
            Gpu.from_variables(None, {"TP": tp})
    else:
        assert container.variables(StartPlan("docker")) == {"PORT": "8000", **({"TP": tp} if tp else {})}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What `./inv up` would start; nothing is started."""
    calls = []
    monkeypatch.setattr(in_environment, "prepare_environment", lambda *_: None)

    def run(device):
        calls.append(device.plan)
        return SimpleNamespace(model_id=device.plan.model, url="http://127.0.0.1")

    monkeypatch.setattr(start, "run", run)
    monkeypatch.setattr(launch, "check_free", lambda *_address: None)
    monkeypatch.setattr(screen, "show_ready", lambda _server: None)
    for name in ("MODEL", "PORT", "TP", "MAX_MODEL_LEN"):
        monkeypatch.delenv(name, raising=False)
    return calls


UP = ["up", "--device", devices.EMBEDDED]


PLAN = StartPlan(EMBEDDED, key_file="", tiny_first=True)


def test_up_takes_the_competitions_variables_where_no_option_says_otherwise(started, tmp_path, monkeypatch, capsys):
    assert program.main(UP) == 0
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    for name, value in {"MODEL": str(tmp_path), "PORT": "8888", "TP": "1", "MAX_MODEL_LEN": "999"}.items():
        monkeypatch.setenv(name, value)
    assert program.main(UP) == 0
    assert program.main([*UP, "--port", "8001"]) == 0
    named = replace(PLAN, model=str(tmp_path), port=8888, flags=("--max-model-len=999",))
    assert started == [PLAN, named, replace(named, port=8001)]
    monkeypatch.setenv("PORT", "abc")
    assert program.main(UP) == 2
    assert "PORT 'abc' is no number" in capsys.readouterr().err
    assert len(started) == 3
