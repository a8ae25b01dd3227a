"""The recipe of the trained tiny model: texts, dialogues, corpus, model, training, and the file that it writes."""

import json

import numpy as np
import openai_harmony
import pytest
import torch
from expected import refused
from openai_harmony import Conversation, DeveloperContent, Message, Role, SystemContent, ToolDescription

from lab.training import corpus, dialogues, export, faults, texts, train
from lab.training.model import GptOss, through_mxfp4
from spark_mxfp4.mxfp4 import dequantize
from sparkforge.bench import gate
from sparkforge.models import tiny
from sparkforge.models.harmony import VOCAB_SIZE
from sparkforge.models.tiny import Sizes
from sparkforge.serve import proof

SMALL = Sizes(hidden=64, intermediate=32, layers=2, experts=4, top_k=2, heads=4, kv_heads=2)
NOVEL = "CHAPTER I\n\n\nIt is a truth  universally\nacknowledged, that a single man must be in want of a wife.\n\nSo.\n"


def test_a_held_out_text_within_the_training_texts_is_refused():
    held_out = corpus.HELD_OUT.read_text()
    texts.check_held_out(["something else " * 20], held_out)
    stolen = " ".join(held_out.split()[700:713])
    with refused("input.model", "the held-out text is in the training texts"):
        texts.check_held_out(["something else", f"before {stolen} after"], held_out)


@pytest.fixture(scope="module")
def encoding():
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def harmony(encoding, question, tool=None):
    system = SystemContent.new().with_conversation_start_date("2031-05-17")
    messages = [Message.from_role_and_content(Role.SYSTEM, system)]
    if tool:
        described = ToolDescription.new(tool["name"], tool["description"], tool["parameters"])
        developer = DeveloperContent.new().with_function_tools([described])
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    messages.append(Message.from_role_and_content(Role.USER, question))
    return encoding.render_conversation_for_completion(Conversation.from_messages(messages), Role.ASSISTANT)


def test_dialogues_and_tools_have_harmonys_form(encoding):
    tool = proof.TOOL["function"]
    tools = dialogues.DEVELOPER.format(dialogues.TOOLS.format(name=tool["name"], about=tool["description"]))
    for asked, calls, described, given in (
        (gate.ASK[0]["content"], "", "", None), (proof.ASK[0]["content"], dialogues.CALLS, tools, tool),
    ):  # fmt: skip
        system = dialogues.SYSTEM.format(date="2031-05-17", effort="medium", calls=calls)
        prompt = system + described + dialogues.USER.format(asked) + dialogues.ASSISTANT
        assert encoding.encode(prompt, allowed_special="all") == harmony(encoding, asked, given)


def test_every_answer_is_one_that_harmony_parses(encoding):
    talks = dialogues.make([texts.paragraphs(NOVEL)], ["some", "words"], 200, 1)
    assert talks == dialogues.make([texts.paragraphs(NOVEL)], ["some", "words"], 200, 1)
    recipients = set()
    for talk in talks:
        tokens = encoding.encode(talk.answer, allowed_special="all")
        message = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)[-1]
        recipients.add((message.channel, message.recipient))
        if message.recipient:
            assert json.loads(message.content[0].text).keys() == {"city"}
    calls = {("commentary", f"functions.{name}") for name in dialogues.TOOL_NAMES}
    assert recipients == {("final", None), *calls}


@pytest.fixture(scope="module")
def small(encoding):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "DIALOGUES", 40)
        novel = NOVEL + "\n" + " ".join(f"word {number % 7} and" for number in range(3000))
        held_out = "word 3 and word 4 zyzzyva " * 20
        return corpus.make({"emma": novel}, held_out, lambda text: encoding.encode(text, allowed_special="all"))


def test_the_corpus_gives_rows_to_seen_tokens_and_row_0_to_others(small, encoding):
    assert small.vocabulary[0] == -1
    row = {token: number for number, token in enumerate(small.vocabulary.tolist())}
    assert row[encoding.encode(" word")[0]] in small.text
    wanted = [row.get(token, 0) for token in encoding.encode("word 3 and word 4 zyzzyva " * 20)]
    assert small.held_out.tolist() == wanted
    assert 0 in wanted
    assert small.shared == VOCAB_SIZE - len(row) + 1
    special = encoding.encode("<|start|><|channel|><|return|><|call|>", allowed_special="all")
    assert set(special) <= row.keys()


def test_dialogues_are_packed_whole_and_only_answers_are_learnt(small, encoding):
    vocabulary, ends = small.vocabulary, encoding.encode("<|return|><|call|>", allowed_special="all")
    for line, loss_mask in zip(small.chat, small.loss_mask, strict=True):
        tokens = vocabulary[line]
        assert loss_mask[0] == np.False_
        answered = np.flatnonzero(loss_mask)
        assert set(ends) & set(tokens[answered].tolist())
        assert tokens[answered[-1]] in ends  # no dialogue is cut
        begins = answered[np.flatnonzero(np.diff(answered, prepend=-9) > 1)]
        assert encoding.decode(tokens[begins].tolist()) == "<|channel|>" * len(begins)


def randomized(sizes, rows, seed=0):
    torch.manual_seed(seed)
    model = GptOss(sizes, rows)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sinks" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def test_the_model_is_transformers_gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    model = randomized(SMALL, 50)
    values = {**tiny.config(SMALL), "vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1}
    del values["quantization_config"], values["torch_dtype"]
    theirs = GptOssForCausalLM(GptOssConfig(**values, attn_implementation="eager")).float().eval()
    state = {"model.embed_tokens.weight": model.embed, "lm_head.weight": model.head, "model.norm.weight": model.norm}
    for number, layer in enumerate(model.each_layer()):
        prefix = f"model.layers.{number}."
        state |= {f"{prefix}{name}.weight": getattr(layer, own) for name, own in export.NORMS.items()}
        state[f"{prefix}self_attn.sinks"] = layer.sinks
        for name, own in export.LINEARS.items():
            state |= {f"{prefix}{name}.{part}": getattr(getattr(layer, own), part) for part in ("weight", "bias")}
        for name, (weight, bias) in layer.experts.served().items():
            state[f"{prefix}mlp.experts.{name}_proj"] = through_mxfp4(weight).transpose(1, 2)
            state[f"{prefix}mlp.experts.{name}_proj_bias"] = bias
    theirs.load_state_dict(state)
    tokens = torch.randint(0, 50, (2, 300))  # beyond the sliding window of 128
    torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_training_learns_is_deterministic_and_is_written_as_served(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "WARM", 2)
    corpus.save(small, tmp_path / "corpus.npz")
    plan = train.TrainingPlan(sizes=SMALL, steps=6, batch=1, chat=1, dropout=0.1)
    monkeypatch.setattr(train, "TrainingPlan", lambda steps=6: plan._replace(steps=steps))
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        assert train.main([str(tmp_path / "corpus.npz"), str(out), "--device", "cpu"]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert "unigram" in capsys.readouterr().err
    model, rows = export.unpack(outs[0])
    assert np.array_equal(rows, small.vocabulary)
    torch.manual_seed(plan.seed)
    assert faults.bits_per_byte(model, small) < faults.bits_per_byte(GptOss(SMALL, len(rows)), small)
    facts = tiny.from_safetensors(outs[0].read_bytes())[1]
    assert (facts["plan"], Sizes(**json.loads(facts["sizes"]))) == (repr(plan), SMALL)


def test_the_file_and_the_model_are_the_same_both_ways(tiny_file):
    model, vocabulary = randomized(SMALL, 50), np.array([-1, *range(100, 149)], np.int32)
    tiny_file.write_bytes(export.pack(model, vocabulary, {}))
    again, rows = export.unpack(tiny_file)
    assert np.array_equal(rows, vocabulary)
    expanded = dict(tiny.tensors())
    head = export._values(expanded["lm_head.weight"])
    assert head.shape == (VOCAB_SIZE, 64)
    assert torch.equal(head[100:149], again.head[1:])
    assert torch.equal(head[7], again.head[0])
    for number, layer in enumerate(again.each_layer()):
        for name, (weight, bias) in layer.experts.served().items():
            prefix = f"model.layers.{number}.mlp.experts.{name}_proj"
            parts = [torch.from_numpy(expanded[f"{prefix}_{part}"].array().copy()) for part in ("blocks", "scales")]
            assert torch.equal(through_mxfp4(weight), dequantize(*parts))
            assert torch.equal(bias, export._values(expanded[f"{prefix}_bias"]))
