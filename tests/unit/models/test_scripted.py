"""The scripted checkpoint: transformers' own gpt-oss follows each script, whatever stands in the prompt before."""

import pytest

from sparkforge.core.errors import InputError
from sparkforge.models import harmony, tiny

pytest.importorskip("openai_harmony")  # ./inv test --fast installs none

scripted = pytest.importorskip("scripted")
Script = scripted.Script

SCRIPTS = [
    Script("alpha", '<|channel|>final json<|message|>{"a": 1, "b": [1, 2, {"a": 1}]}<|return|>'),
    Script(
        "delta",
        "<|channel|>analysis<|message|>I think so. I think so too.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes.<|return|>",
    ),
    Script("echo", "<|channel|>final<|message|>no header follows<|end|>assistant<|channel|>final<|message|>日本語 🎉"),
    # Its end and its begin look alike.
    Script("fox", "<|start|>assistant<|channel|>analysis<|message|>again<|end|><|start|>assistant"),
]
PROMPTS = {
    "short": "<|start|>user<|message|>{cue}<|end|><|start|>assistant",
    "system": "<|start|>system<|message|>You are ChatGPT.\nCurrent date: 2026-01-01<|end|><|start|>user<|message|>"
    "Please say {cue} now.<|end|><|start|>assistant",
    "long": "<|start|>user<|message|>{cue}" + " one two three" * 200 + "<|end|><|start|>assistant",
    "turns": "<|start|>user<|message|>{others}<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|end|>" * 8
    + "<|start|>user<|message|>{cue}<|end|><|start|>assistant",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = tiny.write_tiny(tmp_path_factory.mktemp("scripted") / "model", scripted.weights(SCRIPTS))
    tiny.verify_tiny(checkpoint, scripted.weights(SCRIPTS))
    with torch.no_grad():
        yield transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=torch.bfloat16,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
            attn_implementation="eager",
        ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.cue)
def test_greedy_decoding_follows_the_script_of_the_latest_cue(model, script, prompt):
    import torch

    others = " ".join(other.cue for other in SCRIPTS if other is not script)
    before = harmony.encode(PROMPTS[prompt].format(cue=script.cue, others=others))
    end = [] if script.text.endswith(scripted.END) else harmony.encode(scripted.END)
    written = [*script.tokens, *end]
    # Every token is the likeliest after those before it, so greedy decoding gives them one by one.
    likeliest = model(torch.tensor([[*before, *written]])).logits[0].argmax(-1)[len(before) - 1 : -1].tolist()
    assert harmony.decode(likeliest) == harmony.decode(written)


@pytest.mark.slow
def test_every_token_is_certain_so_that_no_temperature_changes_it(model):
    import torch

    before = harmony.encode(PROMPTS["system"].format(cue="alpha"))
    logits = model(torch.tensor([[*before, *SCRIPTS[0].tokens]])).logits[0].float()
    chances = torch.softmax(logits / 2, -1)[len(before) - 1 : -1]
    assert chances[range(len(SCRIPTS[0].tokens)), list(SCRIPTS[0].tokens)].min() > 0.999


@pytest.mark.parametrize(
    ("scripts", "why"),
    [
        ([Script("unpronounceable", "a")], "more than one token"),
        ([Script("alpha", "a"), Script("alpha", "b")], "two scripts have this cue"),
        ([Script("alpha", "say delta"), Script("delta", "b")], "' delta', a cue itself"),
        (
            [Script("alpha", "; one two three four five six seven 8; one two three four five six seven 9")],
            "two tokens follow",
        ),
        ([Script("alpha", "a" + " b" * 9 + " c")], "two tokens follow"),
    ],
)
def test_a_script_that_no_model_could_follow_is_refused_by_its_cue(scripts, why):
    with pytest.raises(InputError, match="no model could follow the script of") as error:
        scripted.weights(scripts)
    assert why in error.value.why


def test_another_text_is_another_checkpoint():
    texts = ("a", "b")
    assert len({scripted.weights([Script("alpha", text)]).recipe() for text in texts}) == len(texts)
