"""The tiny checkpoint: format, determinism, whole or absent, and a tokenizer that agrees with openai_harmony."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from openai_harmony import (
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    load_harmony_encoding,
)
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.models import harmony, tiny, tiny_random

TEXTS = [
    "Hello world's  \n\n tést 12345678 foo_bar() {}\t//x\r\n  ",
    "日本語 हिन्दी العربية 🎉🎉👩‍👩‍👧 ﬁ ǅ Ⅷ",
    "I'LL we've DON'T CamelCaseHTTPServer snake_case\n\n\n   indented",
    "a" * 300 + " " * 50 + "1" * 20,
    "\x00\x7f\u200b\ufeff\U0010ffff",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("tiny") / "model", tiny.RANDOM)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def encoding():
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def shapes(model):
    shapes_by_name = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                part = file.get_slice(name)
                shapes_by_name[name] = (part.get_dtype(), tuple(part.get_shape()), shard.name)
    return shapes_by_name


def test_tensors_have_the_names_types_and_shapes_of_gpt_oss(model):
    stored = shapes(model)
    layer = "model.layers.3."
    wanted = {
        "model.embed_tokens.weight": ("BF16", (201088, 64)),
        "lm_head.weight": ("BF16", (201088, 64)),
        "model.norm.weight": ("BF16", (64,)),
        layer + "self_attn.q_proj.weight": ("BF16", (256, 64)),
        layer + "self_attn.k_proj.bias": ("BF16", (128,)),
        layer + "self_attn.o_proj.weight": ("BF16", (64, 256)),
        layer + "self_attn.sinks": ("BF16", (4,)),
        layer + "mlp.router.weight": ("BF16", (8, 64)),
        layer + "mlp.router.bias": ("BF16", (8,)),
        layer + "mlp.experts.gate_up_proj_blocks": ("U8", (8, 128, 2, 16)),
        layer + "mlp.experts.gate_up_proj_scales": ("U8", (8, 128, 2)),
        layer + "mlp.experts.gate_up_proj_bias": ("BF16", (8, 128)),
        layer + "mlp.experts.down_proj_blocks": ("U8", (8, 64, 2, 16)),
        layer + "mlp.experts.down_proj_scales": ("U8", (8, 64, 2)),
        layer + "mlp.experts.down_proj_bias": ("BF16", (8, 64)),
    }
    assert {name: stored[name][:2] for name in wanted} == wanted
    assert len(stored) == 3 + 4 * (2 + 8 + 1 + 2 + 6)


def test_index_names_the_shard_of_every_tensor_and_their_size(model):
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: shard for name, (_, _, shard) in shapes(model).items()}
    assert len(set(index["weight_map"].values())) == 2
    tensors = dict(tiny_random.tensors())
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())


def test_tensors_on_disk_are_the_ones_that_were_made(model):
    name, tensor = next((n, t) for n, t in tiny_random.tensors() if n.endswith("1.mlp.experts.down_proj_blocks"))
    with safe_open(model / shapes(model)[name][2], "np") as file:
        assert file.get_tensor(name).tobytes() == tensor.data


def test_config_is_read_as_gpt_oss_mxfp4(model):
    config = AutoConfig.from_pretrained(model)
    assert config.model_type == "gpt_oss"
    assert (config.num_local_experts, config.num_experts_per_tok, config.vocab_size) == (8, 4, 201088)
    assert config.quantization_config["quant_method"] == "mxfp4"
    assert "lm_head" in config.quantization_config["modules_to_not_convert"]
    assert config.layer_types[:2] == ["sliding_attention", "full_attention"]


def test_another_process_in_another_locale_writes_the_same_bytes(model, tmp_path):
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "LC_ALL": "C", "OMP_NUM_THREADS": "1",
        "TZ": "Asia/Tokyo",
    }  # fmt: skip
    command = [sys.executable, "-m", "sparkforge.models.tiny", "--random", tmp_path / "again"]
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)
    names = {path.name for path in model.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    assert all((model / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_the_weights_are_the_recipes(model):
    # Changes on purpose only: raise RECIPE together with these.
    files = json.loads((model / tiny.MANIFEST).read_text())["files"]
    assert tiny_random.RECIPE == 1
    assert {name: entry["sha256"][:16] for name, entry in files.items() if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors": "7df43425cee84e94",
        "model-00002-of-00002.safetensors": "cc45eb90ce1e181a",
    }


@pytest.fixture
def small(monkeypatch):
    """Replace the megabytes by two small files: enough for how directories are written."""
    calls = []

    def files():
        calls.append(1)
        return {"tokenizer.json": b"{}", "model.safetensors": b"weights"}

    monkeypatch.setattr(tiny, "tokenizer_files", files)
    monkeypatch.setattr(tiny, "_weight_files", lambda weights: {})
    return calls


def test_a_whole_directory_is_left_alone(small, tmp_path):
    first = tiny.write_tiny(tmp_path / "model")
    before = first.stat().st_mtime_ns, first.stat().st_ino
    assert tiny.write_tiny(first) == first
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == before
    assert len(small) == 1


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "model.safetensors").write_bytes(b"weightz"), "another sha256"),
        (lambda d: (d / "model.safetensors").write_bytes(b"weight"), "has 6 bytes, not 7"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda d: (d / "manifest.json").write_text('{"recipe": 0, "files": {}}'), "recipe 0"),
    ],
)
def test_a_broken_directory_is_told_and_written_anew(small, tmp_path, harm, message):
    directory = tiny.write_tiny(tmp_path / "model")
    tiny.verify_tiny(directory)
    harm(directory)
    with pytest.raises(InputError, match=message, check=lambda error: error.code == "input.model"):
        tiny.verify_tiny(directory)
    if (directory / tiny.MANIFEST).exists():
        tiny.verify_tiny(tiny.write_tiny(directory))


def test_a_foreign_directory_is_never_overwritten(small, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="will not overwrite"):
        tiny.write_tiny(tmp_path / "model")
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_a_failure_midway_leaves_nothing_and_the_next_run_recovers(small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_weight_files", lambda weights: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny.write_tiny(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    killed = tmp_path / f".model.abc{tiny.TEMPORARY}"  # what a kill -9 leaves
    killed.mkdir()
    (killed / "config.json").write_text("half")
    tiny.verify_tiny(tiny.write_tiny(tmp_path / "model"))
    assert not killed.exists()


def test_the_command_tells_wrong_usage(capsys):
    assert tiny.main([]) == UsageError.exit_code
    assert "next: python -m sparkforge.models.tiny --help" in capsys.readouterr().err


def test_weights_of_the_other_kind_are_replaced(small, tmp_path):
    tiny.write_tiny(tmp_path / "model")
    with pytest.raises(
        InputError, match=r"written by recipe trained .* not random 1", check=lambda error: error.code == "input.model"
    ):
        tiny.verify_tiny(tmp_path / "model", tiny.RANDOM)
    tiny.verify_tiny(tiny.write_tiny(tmp_path / "model", tiny.RANDOM), tiny.RANDOM)


def test_the_vocabulary_is_o200k(tmp_path):
    path = harmony.write_vocabulary(tmp_path)
    assert path.name == "o200k_base.tiktoken"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == harmony.VOCABULARY_SHA256


def test_a_wrong_vocabulary_is_refused(monkeypatch):
    harmony.base_vocabulary.cache_clear()
    monkeypatch.setattr(harmony, "_token_bytes", lambda i: b"x%d" % i)
    with pytest.raises(InputError, match="not the known one", check=lambda error: error.code == "input.model"):
        harmony.base_vocabulary()


def test_harmony_loads_where_there_is_no_network_no_home_and_no_cache(tmp_path):
    code = "import openai_harmony as h; print(h.load_harmony_encoding('HarmonyGptOss').encode('hi'))"
    dead = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy"), "http://127.0.0.1:9")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **dead}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **harmony.offline_environment()},
        check=True,
        capture_output=True,
    )
    assert result.stdout == b"[3686]\n"


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokenizer_agrees_with_harmony(tokenizer, encoding, text):
    ids = encoding.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text


def test_tokenizer_knows_every_id_and_special_token(tokenizer, encoding):
    assert len(tokenizer) == 201088
    ids = tokenizer.convert_tokens_to_ids(
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
    )
    assert ids == [200006, 200007, 200008, 200005, 200002, 200012]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (200002, 199999)
    source = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else (ROOT / "LICENSE").read_text()
    assert tokenizer.encode(source, add_special_tokens=False) == encoding.encode(source)


CONVERSATIONS = {
    "user": [("user", "What is 2 + 2?")],
    "system": [("system", "Be brief.\nNo lists."), ("user", "hi")],
    "developer": [("developer", "Talk like a pirate."), ("user", "Olá 🎉")],
    "turns": [
        ("developer", "Be brief."), ("user", "hi"), ("assistant", "yo"), ("user", "again"),
        ("assistant", "again what?"), ("user", "x"),
    ],
    "spaces": [("user", "  leading and trailing\n\n")],
}  # fmt: skip


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_template_renders_what_harmony_renders(tokenizer, encoding, name, effort):
    turns = CONVERSATIONS[name]
    system = (
        SystemContent.new()
        .with_conversation_start_date("2026-01-31")
        .with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    )
    messages = [Message.from_role_and_content(Role.SYSTEM, system)]
    for role, text in turns:
        if role in ("system", "developer"):
            messages.append(
                Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_instructions(text))
            )
        else:
            message = Message.from_role_and_content(Role(role), text)
            messages.append(message.with_channel("final") if role == "assistant" else message)
    wanted = encoding.render_conversation_for_completion(Conversation.from_messages(messages), Role.ASSISTANT)
    got = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns], add_generation_prompt=True, return_dict=False,
        current_date="2026-01-31", reasoning_effort=effort,
    )  # fmt: skip
    assert got == wanted


def test_template_refuses_a_role_that_it_does_not_render(tokenizer):
    with pytest.raises(Exception, match="not tool"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])
