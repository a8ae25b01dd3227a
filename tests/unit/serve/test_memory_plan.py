"""`up` refuses a container whose model does not fit the memory that is free now."""

import json

import pytest

from sparkforge.core.errors import RefusalError
from sparkforge.image.compose import Service
from sparkforge.models import recipes
from sparkforge.serve import memory_plan


@pytest.fixture
def judged(monkeypatch):
    """What is judged on a machine with unified memory: folder, arguments and variables of each."""
    calls = []
    monkeypatch.setattr(memory_plan, "_unified", lambda: True)
    monkeypatch.setattr(memory_plan, "judge", lambda *arguments: calls.append(arguments))
    return calls


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "gpt-oss-20b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(recipes.load()["gpt-oss-20b"].config)))
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    return folder


def service(**environment):
    environment = {"SPARKFORGE_PROFILE": "spark", "SPARKFORGE_STACK": "spark", **environment}
    return Service("image", "spark", "127.0.0.1", 8000, 1, environment, "")


def project(folder):
    """Return a resolved project that mounts a folder of models."""
    mounts = [{"type": "volume", "source": "cache", "target": "/var/cache"}]
    mounts += [{"type": "bind", "source": str(folder), "target": "/models"}]
    return {"services": {"vllm": {"volumes": mounts}}}


def test_a_share_that_leaves_nothing_beside_it_is_refused_with_figures(model):
    with pytest.raises(RefusalError) as refused:  # more than any machine has beside its system
        memory_plan.judge(model, ("--gpu-memory-utilization=1",), {})
    assert refused.value.code == "validation.too-large"
    assert "GiB free" in refused.value.why


def test_the_mounted_model_and_the_profiles_share_are_judged(model, judged):
    environment = {"SPARKFORGE_MODEL": "/models/gpt-oss-20b", "SPARKFORGE_SERVE_PROFILE": "fast"}
    environment |= {"SPARKFORGE_MAX_MODEL_LEN": "4096", "SPARKFORGE_GUARD_GIB": "5"}
    memory_plan.require_room(service(**environment), project(model.parent))
    ((folder, arguments, variables),) = judged
    assert folder == model
    assert "--gpu-memory-utilization=0.83" in arguments
    assert arguments[-1] == "--max-model-len=4096"
    assert variables["SPARKFORGE_GUARD_GIB"] == "5"  # of .env, which only Compose reads


def test_a_model_in_the_hubs_cache_is_found_where_the_container_will_find_it(model, judged, tmp_path):
    repository = tmp_path / "hf/hub/models--openai--gpt-oss-20b"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    snapshot.parent.mkdir()
    model.rename(snapshot)
    mounts = project(tmp_path / "no-models")
    hub = {"type": "bind", "source": str(tmp_path / "hf/hub"), "target": "/root/.cache/huggingface/hub"}
    mounts["services"]["vllm"]["volumes"].append(hub)
    inside = f"/root/.cache/huggingface/hub/models--openai--gpt-oss-20b/snapshots/{'a' * 40}"
    for name in ("openai/gpt-oss-20b", inside):
        memory_plan.require_room(service(SPARKFORGE_MODEL=name), mounts)
    assert [folder for folder, *_ in judged] == [snapshot, snapshot]
    memory_plan.require_room(service(SPARKFORGE_MODEL="openai/gpt-oss-20b", VLLM_ARGS="--revision other"), mounts)
    memory_plan.require_room(service(SPARKFORGE_MODEL="openai/gpt-oss-120b"), mounts)
    assert len(judged) == 2


def test_a_cache_that_this_user_cannot_read_is_left_to_the_container(judged, tmp_path, capsys):
    repository = tmp_path / "models--openai--gpt-oss-20b"
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    (repository / "refs/main").write_bytes(b"\xff\xfe")
    mounts = project(tmp_path / "no-models")
    hub = {"type": "bind", "source": str(tmp_path), "target": "/root/.cache/huggingface/hub"}
    mounts["services"]["vllm"]["volumes"].append(hub)
    memory_plan.require_room(service(SPARKFORGE_MODEL="openai/gpt-oss-20b"), mounts)
    assert "the container plans its memory" in capsys.readouterr().err


def test_words_behind_the_images_name_name_the_model_too(model, judged):
    document = project(model.parent)
    document["services"]["vllm"]["command"] = ["vllm", "serve", "/models/gpt-oss-20b", "--max-num-seqs", "3"]
    memory_plan.require_room(service(), document)
    ((folder, arguments, _),) = judged
    assert folder == model
    assert arguments[-2:] == ("--max-num-seqs", "3")
    document["services"]["vllm"]["command"] = ["/models/gpt-oss-20b", "--model=/models/x"]  # the container refuses it
    memory_plan.require_room(service(), document)
    assert len(judged) == 1


def test_a_machine_without_such_a_gpu_is_not_judged(model, monkeypatch):
    monkeypatch.setattr(memory_plan, "_unified", lambda: False)
    monkeypatch.setattr(memory_plan, "judge", lambda *_: pytest.fail("there is no unified memory"))
    environment = service(SPARKFORGE_MODEL="/models/gpt-oss-20b")
    memory_plan.require_room(environment, project(model.parent))
