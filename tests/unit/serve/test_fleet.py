"""Several models behind one URL: fleet.toml, its memory, and a fleet of small servers behind the real HAProxy."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import misbehaving
import psutil
import pytest
from programs import write_program
from waiting import wait_for

from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.core.files import read_json, read_toml
from sparkforge.core.paths import ROOT
from sparkforge.serve.fleet import config, keeper
from sparkforge.serve.fleet.keeper import Keeper

KEY = "sesame-fleet"
# The real `./inv up --python` starts this server instead of vLLM, with vLLM's command line.
SMALL = f"""#!{sys.executable}
import json, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(Path(misbehaving.__file__).parent)!r}]
import misbehaving
value = lambda flag: sys.argv[sys.argv.index(flag) + 1]
class Api(misbehaving.Api):
    def answer(self, body):
        if "who" in body:
            clients = self.headers.get_all("X-Forwarded-For")
            return 200, {{"served": value("--model"), "host": self.headers["Host"], "named": body["model"],
                          "clients": clients}}
        return (200, body["pieces"]) if "pieces" in body else super().answer(body)

    def reply(self, status, value):
        if not isinstance(value, int):
            return super().reply(status, value)
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number in range(value):
            self.wfile.write(f"data: {{number}}\\n\\n".encode())
            self.wfile.flush()
            time.sleep(0.25)

if value("--model").endswith("broken"):
    print("(EngineCore pid=7) ERROR 11-21 03:40:13 [core.py:99] RuntimeError: no such kernel", flush=True)
    sys.exit(1)
server = misbehaving.Server(int(value("--port")))
server.RequestHandlerClass = Api
server.serve_forever()
"""


@pytest.fixture
def folder(tmp_path):
    sizes = read_toml(ROOT / "sparkforge/recipes/gpt-oss-20b.toml")["config"]
    for name in ("red", "green", "blue", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
    write_program(tmp_path / "python", SMALL)
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "key").chmod(0o600)
    return tmp_path


def written(folder, **models):
    rows = {name: {"device": "embedded", "memory": 0.1, **row} for name, row in models.items()}
    tables = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items()) for row in rows.values())
    text = "".join(f"[models.{name}]\n{table}" for name, table in zip(rows, tables, strict=True))
    (folder / "fleet.toml").write_text(f"schema = 1\n{text}")
    return folder / "fleet.toml"


def inv(folder, *arguments):
    settings = {"SPARKFORGE_STATE": str(folder / "state"), "SPARKFORGE_VALIDATE": "off", "MODEL": "", "PORT": ""}
    command = [sys.executable, "-m", "sparkforge.cli", *map(str, arguments)]
    env = {**os.environ, **settings}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def fleet(folder, free_port):
    clients = []

    def fleet(**models):
        port, file = free_port(), written(folder, **models)
        options = ("--python", folder / "python", "--port", port, "--api-key-file", folder / "key")
        up = inv(folder, "up", "--fleet", file, *options)
        assert up.returncode == 0, up.stderr
        assert up.stdout == f"http://127.0.0.1:{port}/v1\n"
        headers = {"Authorization": f"Bearer {KEY}"}
        clients.append(httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False))
        return clients[0]

    yield fleet
    for client in clients:
        client.close()
    inv(folder, "down")
    assert mine(folder) == []


def mine(folder):
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("SPARKFORGE_STATE", "")]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            found.append(process.cmdline())
    return found


def server(folder, name):
    return psutil.Process(read_json(folder / f"state/fleet/models/{name}/server.json")["pid"])


def ask(client, model, timeout=60, **more):
    return client.post("/v1/chat/completions", json={**more, "model": model, "who": 1}, timeout=timeout)


def states(folder):
    rows = read_json(folder / "state/fleet/status.json")["models"]
    return {row["name"]: row["state"] for row in rows}


def test_every_name_reaches_its_model_and_nothing_is_left(fleet, folder, monkeypatch):
    client = fleet(red={"resident": True, "aliases": ["gpt-4o", "org/best"]}, green={"resident": False})
    listed = [row["id"] for row in client.get("/v1/models").json()["data"]]
    assert listed == ["red", "openai/red", "gpt-4o", "openai/gpt-4o", "org/best", "best", "green", "openai/green"]
    assert client.get("/v1/models/openai/green").json()["id"] == "openai/green"
    assert states(folder) == {"red": "ready", "green": "stopped"}
    assert 'sparkforge_fleet_model{model_name="green",state="stopped"} 1' in client.get("/metrics").text
    for name in listed:
        model = "green" if "green" in name else "red"
        assert Path(ask(client, name).json()["served"]).name == model
    client.headers["X-Forwarded-For"] = "10.1.1.1"  # a client's own claim does not reach the server
    answer = ask(client, "red").json()
    assert (answer["host"], answer["clients"]) == (f"127.0.0.1:{client.base_url.port}", ["127.0.0.1"])
    assert server(folder, "red").environ()["FORWARDED_ALLOW_IPS"] == "*"
    assert states(folder)["green"] == "ready"
    deep = json.loads("[" * 50 + '{"model": "green"}' + "]" * 50)
    assert Path(ask(client, "red", tools=deep).json()["served"]).name == "red"  # deeper than json_query reads
    assert Path(ask(client, "red", text='x"model": "green"' * 50_000).json()["served"]).name == "red"  # 1 MB
    assert "red: ready · resident · 0.1 GB planned · 0.0 GB of the host" in inv(folder, "ps").stdout
    script = f"case \"$*\" in *compute-apps*) echo '{server(folder, 'red').pid}, 300'; echo '1, 9';; *) exit 9;; esac"
    write_program(folder / "bin/nvidia-smi", script)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    report = json.loads(inv(folder, "status", "--json").stdout)
    rows = report["server"]["fleet"]
    assert rows[1]["names"] == ["green", "openai/green"]
    assert [row["folder"] for row in rows] == [str(folder / "red"), str(folder / "green")]
    assert report["host"]["server"] > rows[0]["memory"] + rows[1]["memory"]
    assert min(row["memory"] for row in rows) > 1_000_000
    assert [row["gpu_memory"] for row in rows] == [300 << 20, 0]
    bounds = [float(server(folder, name).environ()["SPARKFORGE_GUARD_GIB"]) for name in ("red", "green")]
    assert bounds[0] < bounds[1]  # the resident one is ended last
    assert inv(folder, "down").returncode == 0
    assert mine(folder) == []


def test_key_host_and_unknown_models_are_judged_before_a_model(fleet, folder):
    client = fleet(red={"resident": True}, green={"resident": False})
    assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer wrong", "x-api-key": KEY}).status_code == 401
    with httpx.Client(base_url=client.base_url, trust_env=False) as other:
        assert other.get("/v1/models").status_code == 401
        assert other.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200  # as Anthropic's clients
        assert other.post("/health", json={"model": "green"}).status_code == 401  # starts no model
    assert states(folder)["green"] == "stopped"
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/health", headers={"Authorization": ""}).json() == {"red": "ready", "green": "stopped"}
    assert client.get("/wake/red").status_code == 404
    for status, body, message in (
        (404, b'{"model": "rde"}', "The model `rde` does not exist; the nearest: red, green"),
        (400, b'{"prompt": "x"}', "the body names no model"),
        (400, b'{"model": 1}', "the body names no model"),
        (400, b'{"model": "\xff"}', "the body is not a JSON object"),
        (400, b"[" * 100_000, "the body is not a JSON object"),
    ):
        refused = client.post("/v1/completions", content=body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (status, message)
    assert client.delete("/v1/responses/x").json()["error"]["message"] == "Unsupported method ('DELETE')"
    preflight = {"Origin": "http://localhost:3000", "Access-Control-Request-Headers": "authorization"}
    allowed = client.options("/v1/models", headers={**preflight, "Access-Control-Request-Method": "GET"})
    assert allowed.headers["access-control-allow-headers"] == "authorization"


def test_a_model_that_dies_while_loading_answers_with_its_reason_and_the_others_serve(fleet, folder):
    client = fleet(red={"resident": True}, broken={"resident": False})
    failed = ask(client, "openai/broken")
    assert failed.status_code == 503
    assert "RuntimeError: no such kernel" in failed.json()["error"]["message"]
    began = time.monotonic()
    assert ask(client, "broken").json() == failed.json()
    assert time.monotonic() - began < 0.5  # no new start for each request
    assert ask(client, "red").status_code == 200
    place = "state/fleet/models/broken/logs/server.log"
    assert place in json.dumps(json.loads(inv(folder, "doctor", "--json").stdout)["problems"])
    inv(folder, "down")
    written(folder, broken={"resident": True, "model": str(folder / "broken")}).rename(folder / "state/fleet.toml")
    resident = inv(folder, "up", "--fleet", "--python", folder / "python")
    assert resident.returncode == 24
    assert "the resident model broken does not start" in resident.stderr
    assert "no such kernel" in resident.stderr


def test_nothing_is_lost_when_many_ask_first_a_client_leaves_and_parts_are_killed(fleet, folder, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_MODELS", str(folder))
    client = fleet(red={"resident": True}, green={"resident": False})
    refused = inv(folder, "rm", folder / "green", "--yes")  # green does not run yet
    assert (refused.returncode, "green is in use" in refused.stderr) == (28, True), refused.stderr
    with pytest.raises(httpx.ReadTimeout):
        ask(client, "green", timeout=0.3)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(client, "green").status_code, range(20)))
    assert answers == [200] * 20
    server(folder, "green").children()[0].kill()
    wait_for(lambda: "exit code 137" in ask(client, "green").text)
    red = server(folder, "red")
    fleet_server = psutil.Process(read_json(folder / "state/server.json")["pid"])
    next(child for child in fleet_server.children(recursive=True) if child.name() == "haproxy").kill()

    def serves():
        with suppress(httpx.TransportError):
            return ask(client, "red").status_code == 200

    wait_for(serves)
    assert server(folder, "red") == red
    with ThreadPoolExecutor(5) as pool:
        body = {"model": "red", "pieces": 6}
        streams = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(5)]
        time.sleep(0.5)
        assert inv(folder, "down").returncode == 0
        assert [stream.result().text.count("data:") for stream in streams] == [6] * 5


def test_the_least_recently_used_makes_room_but_never_during_a_stream(fleet, folder, monkeypatch):
    free = config.free_memory()["host"] / 1e9
    size = {"resident": False, "memory": round(free * 0.4, 1)}  # two of them fit
    client = fleet(red=size, green=size, blue={**size, "idle": 0.01})
    assert states(folder) == {"red": "stopped", "green": "stopped", "blue": "stopped"}
    assert ask(client, "red").status_code == ask(client, "green").status_code == 200
    pieces, ended = [], threading.Event()

    def stream():
        body = {"model": "red", "pieces": 8}
        with client.stream("POST", "/v1/completions", json=body) as response:
            pieces.extend((time.monotonic(), text) for text in response.iter_text())
        ended.set()

    threading.Thread(target=stream).start()
    wait_for(lambda: pieces)
    ask(client, "green")  # red is now the least recently used, and is stopped once it has answered
    assert Path(ask(client, "blue").json()["served"]).name == "blue"
    assert ended.is_set()
    assert "".join(text for _, text in pieces) == "".join(f"data: {number}\n\n" for number in range(8))
    assert pieces[-1][0] - pieces[0][0] > 1  # piece by piece
    assert states(folder) == {"red": "stopped", "green": "ready", "blue": "ready"}
    body = {"model": "blue", "pieces": 6}  # longer than its idle time
    assert client.post("/v1/completions", json=body).text.count("data:") == 6
    wait_for(lambda: states(folder)["blue"] == "stopped")
    assert ask(client, "blue").status_code == 200  # it restarts


@pytest.fixture
def small_keeper(folder, monkeypatch):
    """A keeper in its state folder, without HAProxy. Memory suffices for one of two models; each start fails."""
    monkeypatch.setenv("SPARKFORGE_STATE", str(folder / "state"))
    (folder / "state/fleet").mkdir(parents=True)
    monkeypatch.chdir(folder / "state")
    same = {"folder": "", "needed": 6, "pool": "host", "resident": False, "idle_seconds": 0, "flags": ()}
    members = [
        config.Member(name=name, names=(name,), arguments=("--device", "nope"), **same) for name in ("red", "green")
    ]
    served = {"address": "127.0.0.1", "port": 1, "key_file": "", "hosts": (), "free": {"host": 10}}
    return Keeper(config.Fleet(members=members, **served), "")


def test_a_model_is_not_started_without_haproxy_and_a_status_that_cannot_be_written_hides_no_reason(
    small_keeper, folder
):
    green = small_keeper.models["green"]
    green.state, green.server = keeper.READY, SimpleNamespace(port=1, where="pid 1")
    why = small_keeper.wake("red")  # green must stop first, and only HAProxy counts its requests
    assert why.startswith("red cannot be started now: ")
    assert "No such file" in why
    assert small_keeper.models["red"].error == why
    small_keeper.tell()
    assert states(folder) == {"red": "stopped", "green": "ready"}
    assert not (folder / "state/fleet/models/red").exists()
    (folder / "state/fleet/status.json").unlink()
    (folder / "state/fleet/status.json/full").mkdir(parents=True)  # makes the write fail, as a full disk would
    green.state = keeper.STOPPED
    small_keeper.tell()
    assert small_keeper.wake("red").startswith("red does not serve: unknown device 'nope'")
    assert small_keeper.models["red"].state == "failed"


def test_models_that_cannot_be_together_are_refused_with_figures(folder):
    file = written(folder, red={"resident": True, "memory": 6}, green={"memory": 5}, blue={"memory": 3})
    with pytest.raises(RefusalError) as refused:
        config.make_plan(config.read(file), folder, {"host": 10_000_000_000})
    assert "11.0 GB are needed at once, 10.0 GB are available (host)" in str(refused.value)
    assert "green: 5.0 GB" in str(refused.value)
    for free, resident in ((12_000_000_000, [True, False, False]), (14_000_000_000, [True, True, True])):
        members = config.make_plan(config.read(file), folder, {"host": free})
        assert [member.resident for member in members] == resident


def test_models_of_one_gpu_get_shares_of_its_memory(folder, fake_nvidia_smi):
    fake_nvidia_smi("NVIDIA H100 80GB HBM3, 9.0, 580.159.04, 81559, 11559, Disabled")
    file = written(
        folder, red={"device": "gpu", "memory": 0}, green={"device": "gpu", "memory": 20, "flags": ["--seed=1"]}
    )
    free = config.free_memory()
    assert free["gpu"] == 70_000 << 20
    red, green = config.make_plan(config.read(file), folder, free)
    assert (red.pool, green.pool, red.resident, green.resident) == ("gpu", "gpu", True, True)
    assert green.flags == ("--gpu-memory-utilization=0.24", "--seed=1")
    assert float(red.flags[0].partition("=")[2]) * 81559 * 2**20 >= red.needed > 10e9


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"red": {"aliases": ["x"]}, "green": {"aliases": ["openai/x"]}}, "red and green both have the name"),
        ({"red": {"flags": ["--port=1"]}}, "--port cannot be passed to vLLM"),
        ({"red": {"idle": -1}}, "models.red.idle"),
        ({"red": {"colour": 1}}, "models.red.colour"),
        ({"nowhere": {}}, "nowhere is neither a recipe"),
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused_by_name(folder, models, message):
    with pytest.raises(InputError, match=message):
        config.make_plan(config.read(written(folder, **models)), folder, {"host": 1 << 40})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "schema: Field required"),
        (b"schema = 1\n", "models: Field required"),
        (b"schema = 1\n" + b"[models.red]\n" * 2, "twice"),
        (b'schema = 1\n[models."a b"]\n', "a b"),
        (b"\xd0\x00", "it is not text"),
    ],
)
def test_a_file_that_is_no_fleet_is_refused_by_name(folder, text, message):
    (folder / "fleet.toml").write_bytes(text)
    with pytest.raises(InputError, match=message) as refused:
        config.read(folder / "fleet.toml")
    assert str(folder / "fleet.toml") in refused.value.fix


def test_a_file_is_required_and_options_of_one_model_belong_in_it(folder):
    with pytest.raises(UsageError, match=r"there is no file .*fleet\.toml"):
        config.read(folder / "fleet.toml")
    with pytest.raises(UsageError, match="is a folder"):
        config.read(folder)
    refused = inv(folder, "up", "--fleet", "fleet.toml", "--profile", "fast")
    assert refused.returncode == 2
    assert "--fleet cannot be combined with --profile" in refused.stderr
