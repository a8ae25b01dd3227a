"""Two models of real vLLM behind one URL, with the openai client: names, a stream, a start on demand, idle, down."""

import os
import re
import subprocess
import sys
import time
import urllib.request

import pytest
from waiting import wait_for

from sparkforge.core.files import read_json
from sparkforge.core.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]
TABLE = """schema = 1
[models.red]
model = "tiny-gpt-oss"
device = "embedded"
resident = true
aliases = ["gpt-4o"]
[models.green]
model = "tiny-gpt-oss"
device = "embedded"
resident = false
idle = 0.1
"""


def test_two_models_of_vllm_answer_at_one_url(tmp_path, free_port):
    import openai

    state, port = tmp_path / "state", free_port()
    env = {**os.environ, "SPARKFORGE_STATE": str(state), "SPARKFORGE_VALIDATE": "off", "MODEL": "", "PORT": ""}

    def inv(*arguments):
        command = [sys.executable, "-m", "sparkforge.cli", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def green():
        return read_json(state / "fleet/status.json")["models"][1]["state"]

    (tmp_path / "fleet.toml").write_text(TABLE)
    try:
        up = inv("up", "--fleet", tmp_path / "fleet.toml", "--python", sys.executable, "--port", port)
        assert up.returncode == 0, up.stderr
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
        listed = [model.id for model in client.models.list()]
        assert listed == ["red", "openai/red", "gpt-4o", "openai/gpt-4o", "green", "openai/green"]
        messages = [{"role": "user", "content": "Hello"}]
        answered = [client.chat.completions.create(model=n, messages=messages, max_tokens=8).model for n in listed[2:5]]
        assert answered == ["red", "red", "green"]
        options = {"max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
        times = [time.monotonic() for _ in client.chat.completions.create(model="green", messages=messages, **options)]
        assert times[-1] - times[0] > 0.5  # piece by piece
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        assert metrics.count("# TYPE vllm:num_requests_running gauge") == 1
        assert set(re.findall(r'vllm:num_requests_running{.*model_name="(.*?)"', metrics)) == {"red", "green"}
        with pytest.raises(openai.NotFoundError, match="the nearest: green"):
            client.chat.completions.create(model="gren", messages=messages)
        wait_for(lambda: green() == "stopped")
    finally:
        assert inv("down").returncode == 0
