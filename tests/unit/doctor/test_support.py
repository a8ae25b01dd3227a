"""The support archive: whole or absent, the same bytes from the same evidence, and no planted secret in it."""

import getpass
import json
import socket
import tarfile
from pathlib import Path

import pytest
from expected import refused

from sparkforge.doctor import doctor, evidence, support
from validate.facts.fact import Fact

# Secrets that must not leak, each in a log, a report, a manifest, an environment, a command line or a file's name.
SECRETS = {
    "hub token": "hf_PlantedTokenOfAnna123",
    "api key": "sesame-open-91",
    "bearer": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4",
    "cloud key": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "private key": "b3BlbnNzaC1rZXktdjEAAAAABG5vbmU",
    "home": "annas-home",
    "user": "annamaria",
    "host": "annas-spark-7",
    "address": "192.168.77.12",
    "address 6": "fe80::a86b:69ff:fe67:e3fe",
    "mac": "48:b0:2d:5c:1e:9a",
    "mail": "anna@example.org",
    "gpu": "GPU-8f6b1c9e-1111-2222-3333-444455556666",
    "unknown variable": "a-value-of-something",
}
LINES = """\
(APIServer pid=1) INFO non-default args: {{'api_key': ['{api key}'], 'model': '/home/{home}/models/gpt-oss-120b'}}
HF_TOKEN={hub token} AWS_SECRET_ACCESS_KEY={cloud key} vllm serve --api-key {api key} --hf-token={hub token}
Authorization: Bearer {bearer}
https://{user}:{api key}@{host}.local:8443/v1 and ssh {user}@{host}
{host}:77:77 [0] NCCL INFO NET/Socket : Using [0]enp1s0:{address}<0> [1]enp2s0:{address 6}%enp2s0<0>
link/ether {mac} brd ff:ff:ff:ff:ff:ff, mail {mail}, {gpu}
File "/home/{home}/env/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 7
-----BEGIN OPENSSH PRIVATE KEY-----
{private key}
-----END OPENSSH PRIVATE KEY-----
RuntimeError: CUDA error: invalid resource handle
"""


def planted():
    text = LINES
    for name, secret in SECRETS.items():
        text = text.replace(f"{{{name}}}", secret)
    return text.replace("{{", "{").replace("}}", "}")


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder = tmp_path / SECRETS["home"] / "state"
    (folder / "logs").mkdir(parents=True)
    monkeypatch.setenv("SPARKFORGE_STATE", str(folder))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(socket, "gethostname", lambda: SECRETS["host"])
    monkeypatch.setattr(getpass, "getuser", lambda: SECRETS["user"])
    machine = {"cudnn.version": Fact("9.20.0.48", "x"), "os.name": Fact(SECRETS["host"], SECRETS["address"])}
    monkeypatch.setattr(evidence, "machine_facts", lambda: machine)
    return folder


def fill(state):
    text = planted()
    (state / "logs" / "server.log").write_text(text)
    (state / "kernels" / "logs").mkdir(parents=True)
    (state / "kernels" / "logs" / "unit.log").write_text(text)
    finding = {"check": "x", "status": "fail", "required": True, "evidence": text, "fix": text, "doc": ""}
    report = {
        "verdict": "refuse",
        "findings": [finding],
        "facts": {"serve.args": {"value": ["--api-key", SECRETS["api key"]]}},
    }
    (state / "validation.json").write_text(json.dumps(report))
    (state / "x.manifest.json").write_text(json.dumps({"inputs": {f"/home/{SECRETS['home']}/x": text}, "token": "t"}))
    failure = dict.fromkeys(("error", "what", "why", "fix"), text) | {"began": 0.0, "ended": 1.0}
    (state / "failure.json").write_text(json.dumps(failure))


def bundle(path):
    with refused("validation.problems"):
        doctor.main(log="", state="", as_json=False, bundle=str(path))
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}


def leaked(files):
    return {
        (name, file) for file, text in files.items() for name, secret in SECRETS.items() if secret in f"{file} {text}"
    }


def test_no_planted_secret_reaches_the_archive(state, tmp_path, fake_engine):
    fill(state)
    assert all(secret in planted() for name, secret in SECRETS.items() if name != "unknown variable")
    fake_engine.log = planted()
    fake_engine.container["State"] |= {"Status": "exited", "FinishedAt": "9999-01-01T00:00:00Z", "Error": planted()}
    fake_engine.container["Config"] |= {
        "Env": [f"HF_TOKEN={SECRETS['hub token']}", f"MINE={SECRETS['unknown variable']}", "VLLM_PLUGINS=spark_mxfp4"],
        "Cmd": ["--api-key", SECRETS["api key"], "--model", f"/home/{SECRETS['home']}/m"],
    }
    files = bundle(tmp_path / "support.tar.gz")
    assert leaked(files) == set()
    assert "VLLM_PLUGINS=spark_mxfp4" in files["sparkforge-support/docker/inspect.json"]
    assert "MINE=…" in files["sparkforge-support/docker/inspect.json"]


def test_useful_facts_stay_in_it_and_its_content_is_printed(state, tmp_path, capsys):
    fill(state)
    files = bundle(tmp_path / "support.tar.gz")
    log = next(text for name, text in files.items() if name.endswith("server.log"))
    assert 'File "<path>/site-packages/vllm/v1/engine/core.py", line 7' in log
    assert "CUDA error: invalid resource handle" in log
    assert "9.20.0.48" in files["sparkforge-support/facts.json"]
    document = json.loads(files["sparkforge-support/doctor.json"])
    assert "invalid-resource-handle" in [problem["id"] for problem in document["problems"]]
    assert leaked(files) == set()
    printed = capsys.readouterr().err
    assert [name for name in files if name.removeprefix("sparkforge-support/") not in printed] == []


def test_the_same_evidence_gives_the_same_bytes_in_order_without_owner_or_time(tmp_path):
    collected = evidence.Evidence(facts={"b": 1, "a": 2}, documents={"z": {}, "y": {"k": 1}}, machine={"m": 1})
    places = [tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"]
    for location in places:
        support.write(location, {"problems": []}, collected)
    assert places[0].read_bytes() == places[1].read_bytes()
    assert places[0].read_bytes()[4:8] == bytes(4)  # gzip's own time
    with tarfile.open(places[0]) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    assert {(info.mtime, info.uid, info.gid, info.uname, info.mode) for info in members} == {(0, 0, 0, "", 0o644)}
    assert places[0].stat().st_mode & 0o077 == 0


def logged(data):
    log = evidence.Log("x.log", lambda: iter([data[at : at + 100_000] for at in range(0, len(data), 100_000)]))
    for _ in log.chunks():
        pass
    return log.excerpt()


def test_a_long_log_is_kept_as_its_begin_and_its_end_in_whole_lines():
    data = b"".join(b"line %d HF_TOKEN=hf_secretsecret\n" % number for number in range(100_000))
    kept = logged(data)
    assert len(kept) < evidence.HEAD + evidence.TAIL + 100
    assert kept.startswith(b"line 0 ")
    assert kept.endswith(b"line 99999 HF_TOKEN=hf_secretsecret\n")
    assert b"bytes left out" in kept
    assert all(line.startswith((b"line ", b"[... ")) for line in kept.split(b"\n") if line)


def test_a_short_log_is_kept_and_a_single_endless_line_is_not():
    for data in (b"", b"x", b"a\nb", b"x" * evidence.TAIL):
        assert logged(data) == data
    assert b"x" not in logged(b"x" * 5_000_000)


@pytest.mark.slow
def test_many_logs_are_bounded(monkeypatch):
    def log(name, kind, number):
        large_log = evidence.Log(name, lambda: iter([b"text\n" * 1000]), kind=kind, written=float(number))
        list(large_log.chunks())
        return large_log

    units = [log(f"unit{number}.log", evidence.UNIT, number) for number in range(100)]
    collected = evidence.Evidence(logs=[log("server.log", evidence.EMBEDDED, 0), *units])
    names = {name for name in support.members({}, collected) if name.startswith("logs/")}
    assert len(names) == support.UNIT_LOGS + 1
    assert {"logs/unit99.log", "logs/server.log"} <= names
    monkeypatch.setattr(support, "MAX_TOTAL", 12_000)
    assert len([name for name in support.members({}, collected) if name.startswith("logs/")]) == 2


def test_names_in_the_archive_stay_in_its_folders():
    refused = {"c0ffee:/var/cache/sparkforge/state/refused.json": {}}
    collected = evidence.Evidence(reports=refused, documents={"../../etc/passwd": {}, "/": {}, "x\0y": {}})
    names = support.members({}, collected)
    assert "reports/c0ffee_refused.json" in names
    assert not [name for name in names if ".." in Path(name).parts or Path(name).is_absolute()]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("storage.access", r"support\.tar\.gz"):
        support.write(tmp_path / "file" / "support.tar.gz", {}, evidence.Evidence())
