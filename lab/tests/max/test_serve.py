"""The tiny checkpoint served by MAX on a CPU: our commands, its API, and the greedy tokens of transformers."""

import json

import httpx
import psutil
import pytest
import torch

from spark_mxfp4 import hf
from sparkforge.core.paths import ROOT
from sparkforge.serve.devices import max_server

# The first test waits for a start that may compile the model; the timeout is that of `max.up`.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(max_server.START_SECONDS)]
CORPUS = ROOT / "sparkforge" / "bench" / "corpus" / "persuasion-24.txt"
# Tokens of a prompt: below, at and above the window of 128. MAX's CPU attention takes blocks of 128 keys; 300 tokens
# are three blocks.
LENGTHS = (8, 63, 127, 128, 129, 139, 173, 300)
GENERATED = 32
# The largest margin of the reference's first logit where the tokens diverge. With transformers' own bfloat16: 0.003.
LEADS = {"cpu": 0.0, "gpu": 0.1}


@pytest.fixture(scope="module")
def server(checkout, started):
    assert started.returncode == 0, started.stderr
    return checkout


@pytest.fixture(scope="module")
def tokenizer(server):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(server.model)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    tokens = tokenizer(CORPUS.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return {length: tokens[:length] for length in LENGTHS}


@pytest.fixture(scope="module")
def answers(server, prompts):
    def complete(prompt):
        body = {"model": "tiny-gpt-oss", "prompt": prompt, "max_tokens": GENERATED, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120).json()
        assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": GENERATED} | answer["usage"]
        return answer["choices"][0]["text"]

    return {length: complete(prompt) for length, prompt in prompts.items()}


def test_greedy_tokens_are_those_of_transformers(answers, checkout, prompts, tokenizer, device):
    """On a CPU all tokens are equal; on a GPU, in bfloat16, until the reference's margin is tiny."""
    model = hf.load_packed(str(checkout.model), dtype=torch.float32, attn_implementation="eager").eval()
    parted = {}
    for length, prompt in prompts.items():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=GENERATED, do_sample=False, eos_token_id=None,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        ids = output.sequences[0, length:].tolist()
        equal = sum(answers[length].startswith(tokenizer.decode(ids[: count + 1])) for count in range(GENERATED))
        if equal < GENERATED:
            best, second = output.scores[equal][0].topk(2).values.tolist()
            parted[length] = (equal, round(best - second, 3))
    assert all(lead < LEADS[device] for _, lead in parted.values()), f"prompt: equal tokens, lead there: {parted}"


def test_up_proves_what_max_answers_and_status_shows_it(server, started, device):
    assert started.stdout == f"{server.url}/v1\n"
    assert "proved: a chat, a completion, a streamed chat, a streamed completion" in started.stderr
    report = json.loads(server.inv("status", "--json").stdout)["server"]
    assert (report["model"], report["device"], report["profile"]) == ("tiny-gpt-oss", "max", device)
    assert report["healthy"]
    assert report["context"] == 512


def test_a_chat_is_answered_by_the_api_and_by_our_command(server):
    body = {"model": "tiny-gpt-oss", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "temperature": 0}, timeout=120).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= answer["usage"]["completion_tokens"] <= 8
    chat = server.inv("chat", "Hello", "--max-tokens", "8")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()


def test_nothing_is_sent_to_modular(server):
    """There is no open connection to another machine, and no attempt in the log."""
    connections = [connection for process in processes(server) for connection in process.net_connections("inet")]
    assert any(connection.laddr.port == server.port for connection in connections)
    assert all(not connection.raddr or connection.raddr.ip == "127.0.0.1" for connection in connections)
    assert "telemetry" not in server.log.lower()


def test_down_ends_every_process(server):
    running = processes(server)
    assert len(running) > 1
    down = server.inv("down")
    assert down.returncode == 0
    assert down.stderr == f"stopped {server.url}\n"
    assert not psutil.wait_procs(running, timeout=30)[1]
    assert server.inv("status").returncode == 24


def processes(server):
    supervisor = psutil.Process(json.loads((server.state / "server.json").read_text())["pid"])
    return [supervisor, *supervisor.children(recursive=True)]
