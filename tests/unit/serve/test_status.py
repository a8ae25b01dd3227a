"""`./inv status` with a small server instead of vLLM, whose counters the test sets."""

import json

import pytest
from loopback import Quiet, serving
from programs import write_program
from servers import recorded

from sparkforge.cli import program
from sparkforge.core.errors import NetworkError, ServerError
from sparkforge.serve import record, status

METRICS = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:generation_tokens_total{{engine="1",model_name="m"}} 1.0
vllm:generation_tokens_created{{engine="0",model_name="m"}} 1.7e+09
vllm:prompt_tokens_total{{engine="0"}} 7.0
vllm:num_requests_running{{engine="0"}} 2.0
vllm:num_requests_waiting{{engine="0"}} 3.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 9.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} NaN
vllm:spec_decode_num_drafts_total{{engine="0"}} {tokens}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {tokens}
vllm:spec_decode_num_accepted_tokens_total{{engine="1"}} 0.5
"""
LOG = """\
INFO 11-21 03:40:12 [core.py:1] all is well
(EngineCore pid=7) ERROR 11-21 03:40:13 [core.py:99] RuntimeError: no such kernel
Error in a line that is not the logger's
INFO 11-21 03:40:14 [core.py:1] all is well
"""


class Api(Quiet):
    def get(self):
        if self.path == "/metrics":
            self.server.tokens += 1000
            self.reply(200, self.server.metrics.format(tokens=self.server.tokens).encode())
        else:
            self.reply(200, {"data": [{"id": "m", "max_model_len": 4096}]} if self.path == "/v1/models" else {})


@pytest.fixture
def server(request, monkeypatch):
    """A recorded server whose process is this test's; the parameter is the text of its /metrics."""
    monkeypatch.setattr(status, "INTERVAL", 0.01)
    record.log_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with serving(Api, tokens=0, metrics=getattr(request, "param", METRICS)) as http_server:
        proved = {"profile": "embedded", "proved": 1.8e9, "proof": {"a chat": ""}}
        server = recorded(http_server.server_port, log=str(record.log_path()), **proved)
        record.write(server)
        yield server


@pytest.fixture(autouse=True)
def no_gpu(fake_nvidia_smi):
    fake_nvidia_smi("")


def test_the_figures_are_the_servers(server):
    record.log_path().write_text(LOG)
    report = status.report(server)
    served = report.server
    assert (served.model, served.profile, served.context, served.healthy) == ("m", "embedded", 4096, True)
    assert (served.load.running, served.load.waiting, served.load.kv_used) == (2, 3, 0.25)
    assert served.load.generated_per_second * served.load.seconds == pytest.approx(1000, rel=0.1)  # rounded
    assert (served.load.prompt_per_second, served.load.tokens_per_draft) == (0, 2.0)
    assert "· 2.00 tokens a step with a draft" in "".join(status.lines(report))
    assert 0 < served.uptime_seconds < 1e6
    assert 0 < report.host.available <= report.host.total
    assert report.host.server is not None
    error = {"source": "log", "when": "11-21 03:40:13", "text": "RuntimeError: no such kernel"}
    assert report.last_error == status.LastError(**error)


def test_json_has_its_format(server, capsys):
    assert program.main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert status.StatusReport.model_validate(document).server.model == "m"
    assert document["format"] == "sparkforge-status/1"
    assert document["gpus"] == []


@pytest.mark.parametrize("server", ["", "vllm:generation_tokens_total nonsense {{", "\x00\xff"], indirect=True)
def test_unknown_metrics_are_ignored(server, capsys):
    assert program.main(["status"]) == 0
    assert "now: /metrics does not answer\n" in capsys.readouterr().out


def test_without_a_server_it_says_so_and_json_has_the_last_failure(capsys):
    with pytest.raises(NetworkError), record.remembered():
        raise NetworkError("cannot find x", "no network", "", code="network.fetch")
    assert program.main(["status", "--json"]) == ServerError.exit_code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["server"] is None
    assert document["last_error"]["text"] == "cannot find x: no network"
    assert "no server is running" in err
    assert program.main(["down"]) == 0
    assert "nothing to stop" in capsys.readouterr().err


FAST, SLOW = "2405, 3003, 60.1, [N/A], 70, 96, 0x0", "700, 3003, 14.2, [N/A], 45, 96, 0x0"


@pytest.mark.parametrize(
    ("gpu", "clock", "messages"),
    [
        ("NVIDIA H200, 143771, 1024, 0", FAST, ["NVIDIA H200 1.1 of 150.8 GB used, busy 0%"]),
        ("NVIDIA GB10, [N/A], [Not Supported], 40", FAST, ["shares it (unified memory), busy 40%", "2405 of 3003 MHz"]),
        ("NVIDIA GB10, [N/A], [N/A], 96", SLOW, ["warning: NVIDIA GB10: the clock is below half"]),
    ],
)
def test_a_gpu_by_nvidia_smi_and_a_slow_one_is_a_warning(server, tmp_path, monkeypatch, capsys, gpu, clock, messages):
    script = f"case \"$*\" in *clocks.sm*) echo '{clock}';; *) echo '{gpu}';; esac"
    monkeypatch.setenv("PATH", str(write_program(tmp_path / "bin/nvidia-smi", script).parent), prepend=":")
    status.show_status(server)
    output = capsys.readouterr().out
    assert [message for message in messages if message not in output] == []
    assert ("warning:" in output) == (clock == SLOW)
    [read] = status.report_of_none().gpus
    assert (read.unified, read.clock_mhz) == ("GB10" in gpu, float(clock.partition(",")[0]))
