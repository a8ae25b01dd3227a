"""Records the trained tiny checkpoint's answers in float32: `python -m lab.first_answers MODEL`.

Run it with an interpreter that has torch and transformers, such as .sparkforge/envs/embedded/bin/python, on the folder
that `python -m sparkforge.models.tiny MODEL` wrote. It writes sparkforge/serve/first_answers.json. It uses only answers
with a clear margin at each token, so that bfloat16 changes no token.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sparkforge.core.files import write_json
from sparkforge.serve.first_answers import ANSWERS, MARGIN, TOKENS

TURNS = (0, 3, 12)  # before the last message: prompts below the window of 128 tokens, near it, and above it
MESSAGES = ("Hello", "Who are you?", "What can you do?")


def main(folder: Path) -> None:
    """Generate greedily with the whole sequence at each step, so that no cache is involved."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    dequantized = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=dequantized, attn_implementation="eager"
    ).float()
    answers = []
    with torch.inference_mode():
        for turns in TURNS:
            margins = {}
            for message in MESSAGES:
                greeting = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "How do you do!"}]
                chat = [*greeting * turns, {"role": "user", "content": message}]
                prompt = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
                tokens, margin = [*prompt], float("inf")
                for _ in range(TOKENS):
                    values, ids = model(torch.tensor([tokens])).logits[0, -1].topk(2)
                    margin = min(margin, float(values[0] - values[1]))
                    tokens.append(int(ids[0]))
                margins[margin] = (prompt, tokens)
            prompt, tokens = margins[max(margins)]
            if max(margins) < MARGIN:
                raise SystemExit(f"no answer after {turns} turns has a clear margin: {max(margins):.2f}")
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            scores = [round(float(logprobs[at - 1, token]), 4) for at, token in enumerate(tokens) if at]
            answers.append({"prompt": prompt, "tokens": tokens[len(prompt) :], "logprobs": scores})
            words = tokenizer.decode(tokens[len(prompt) :])
            sys.stdout.write(f"{len(prompt)} tokens, ahead by {max(margins):.2f}: {words!r}\n")
    write_json(ANSWERS, {"answers": answers})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
