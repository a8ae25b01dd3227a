"""The tiny checkpoint: format, determinism, whole or absent, and a tokenizer that agrees with openai_harmony."""

import hashlib
import os
import subprocess
import sys

import pytest
import tiny_random
from expected import refused
from openai_harmony import (
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    load_harmony_encoding,
)
from openai_harmony import HarmonyEncodingName as Encoding
from programs import write_files
from transformers import AutoTokenizer

from sparkforge.core import manifest
from sparkforge.core.errors import UsageError
from sparkforge.models import harmony, tiny

TEXTS = [
    "Hello world's  \n\n tést 12345678 foo_bar() {}\t//x\r\n  I'LL CamelCaseHTTPServer" + " " * 50 + "1" * 20,
    "日本語 हिन्दी العربية 🎉🎉👩‍👩‍👧 ﬁ ǅ Ⅷ\x00\x7f\u200b\ufeff\U0010ffff",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("tiny") / "model", tiny_random.RANDOM)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def encoding():
    return load_harmony_encoding(Encoding.HARMONY_GPT_OSS)


def test_the_weights_are_the_recipes(model):
    # Change these hashes only on purpose, and increase RECIPE.
    files = manifest.load(model).outputs
    assert tiny_random.RECIPE == 1
    assert {name: sha256[:16] for name, sha256 in files.items() if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors": "7df43425cee84e94",
        "model-00002-of-00002.safetensors": "cc45eb90ce1e181a",
    }


@pytest.fixture
def small(monkeypatch):
    """Replace the large files by two small ones, which suffice to test how directories are written."""
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


def is_whole(directory):
    return manifest.is_intact(manifest.load(directory), directory)


@pytest.mark.parametrize(
    "harm", [lambda d: (d / "config.json").unlink(), lambda d: (d / "model.safetensors").write_bytes(b"weightz")]
)
def test_a_broken_directory_is_written_anew(small, tmp_path, harm):
    directory = tiny.write_tiny(tmp_path / "model")
    harm(directory)
    assert not is_whole(directory)
    assert is_whole(tiny.write_tiny(directory))


@pytest.mark.parametrize("manifest_text", [None, "[]"])
def test_a_directory_without_our_manifest_is_never_overwritten(small, tmp_path, manifest_text):
    write_files(tmp_path, {"model/thesis.txt": "mine"})
    if manifest_text:
        manifest.beside(tmp_path / "model").write_text(manifest_text)
    with pytest.raises(UsageError, match="will not overwrite"):
        tiny.write_tiny(tmp_path / "model")
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_a_wrong_vocabulary_is_refused(monkeypatch):
    harmony.base_vocabulary.cache_clear()
    monkeypatch.setattr(harmony, "_token_bytes", lambda i: b"x%d" % i)
    with refused("input.model", "not the known one"):
        harmony.base_vocabulary()


def test_harmony_loads_where_there_is_no_network_no_home_and_no_cache(tmp_path):
    code = "import openai_harmony as h; print(h.load_harmony_encoding('HarmonyGptOss').encode('hi'))"
    dead = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy"), "http://127.0.0.1:9")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **dead}
    environment |= harmony.offline_environment()
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"[3686]\n"


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokenizer_agrees_with_harmony(tokenizer, encoding, text):
    ids = encoding.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text


def test_template_renders_what_harmony_renders(tokenizer, encoding):
    turns = ("hi", "yo", "Olá 🎉", "again what?", "  x\n\n")
    system = SystemContent.new().with_conversation_start_date("2026-01-31")
    instructions = DeveloperContent.new().with_instructions("Be brief.")
    messages = [Message.from_role_and_content(Role.SYSTEM, system.with_reasoning_effort(ReasoningEffort.HIGH))]
    messages.append(Message.from_role_and_content(Role.DEVELOPER, instructions))
    spoken = [{"role": "developer", "content": "Be brief."}]
    for number, text in enumerate(turns):
        role = ("user", "assistant")[number % 2]
        message = Message.from_role_and_content(Role(role), text)
        messages.append(message.with_channel("final") if role == "assistant" else message)
        spoken.append({"role": role, "content": text})
    wanted = encoding.render_conversation_for_completion(Conversation.from_messages(messages), Role.ASSISTANT)
    more = {"current_date": "2026-01-31", "reasoning_effort": "high"}
    assert tokenizer.apply_chat_template(spoken, add_generation_prompt=True, return_dict=False, **more) == wanted


def test_the_vocabulary_is_o200k(tmp_path):
    path = harmony.write_vocabulary(tmp_path)
    assert path.name == "o200k_base.tiktoken"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == harmony.VOCABULARY_SHA256
