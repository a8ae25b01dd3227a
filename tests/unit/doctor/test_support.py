"""The support archive: whole or absent, the same bytes from the same evidence, and no planted secret in it."""

import json
import tarfile
from pathlib import Path

import pytest
from expected import refused

from sparkforge.doctor import doctor, evidence
from validate.facts.fact import Fact

# Secrets that must not leak from a log, a report, a manifest, an environment, a command line or a file's name. They are
# in all these places; tests/unit/core/redact_samples.toml has all kinds of secrets.
SECRETS = {
    "token": "hf_PlantedTokenOfAnna123", "key": "sesame-open-91", "home": "annas-home", "user": "annamaria",
    "host": "annas-spark-7", "address": "192.168.77.12", "unknown variable": "a-value-of-something",
}  # fmt: skip
PLANTED = """\
(APIServer pid=1) INFO default args: {'api_key': ['sesame-open-91'], 'model': '/home/annas-home/models/gpt-oss-120b'}
HF_TOKEN=hf_PlantedTokenOfAnna123 vllm serve --api-key sesame-open-91
https://annamaria:sesame-open-91@annas-spark-7.local:8443/v1, ssh annamaria@annas-spark-7, 192.168.77.12
File "/home/annas-home/env/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 7
RuntimeError: CUDA error: invalid resource handle
"""


@pytest.fixture
def planted(tmp_path, set_hostname, monkeypatch):
    """A state folder and facts of a machine, with SECRETS in all places."""
    folder = tmp_path / SECRETS["home"] / "state"
    monkeypatch.setenv("SPARKFORGE_STATE", str(folder))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    set_hostname(SECRETS["host"])
    monkeypatch.setenv("LOGNAME", SECRETS["user"])
    machine = {"cudnn.version": Fact("9.20.0.48", "x"), "os.name": Fact(SECRETS["host"], SECRETS["address"])}
    monkeypatch.setattr(evidence, "machine_facts", lambda: machine)
    finding = {"check": "x", "status": "fail", "required": True, "evidence": PLANTED, "fix": PLANTED, "doc": ""}
    arguments = {"serve.args": {"value": ["--api-key", SECRETS["key"]]}}
    failure = dict.fromkeys(("error", "what", "why", "fix"), PLANTED) | {"began": 0.0, "ended": 1.0}
    inputs = {f"/home/{SECRETS['home']}/x": PLANTED}
    files = {
        "logs/server.log": PLANTED,
        "kernels/logs/unit.log": PLANTED,
        "validation.json": json.dumps({"verdict": "refuse", "findings": [finding], "facts": arguments}),
        "x.manifest.json": json.dumps({"inputs": inputs, "token": "t"}),
        "failure.json": json.dumps(failure),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_no_planted_secret_reaches_the_archive_useful_facts_do_and_its_content_is_printed(
    planted, tmp_path, fake_engine, capsys
):
    fake_engine.log = PLANTED
    fake_engine.container["State"] |= {"Status": "exited", "FinishedAt": "9999-01-01T00:00:00Z", "Error": PLANTED}
    fake_engine.container["Config"] |= {
        "Env": [f"HF_TOKEN={SECRETS['token']}", f"MINE={SECRETS['unknown variable']}", "VLLM_PLUGINS=spark_mxfp4"],
        "Cmd": ["--api-key", SECRETS["key"], "--model", f"/home/{SECRETS['home']}/m"],
    }
    with refused("validation.problems"):
        doctor.main(log="", state="", as_json=False, bundle=str(tmp_path / "support.tar.gz"))
    with tarfile.open(tmp_path / "support.tar.gz") as archive:
        files = {
            member.name.removeprefix("sparkforge-support/"): archive.extractfile(member).read().decode()
            for member in archive.getmembers()
        }
    texts = [f"{name} {text}" for name, text in files.items()]
    assert [(name, text) for name, secret in SECRETS.items() for text in texts if secret in text] == []
    printed = capsys.readouterr().err
    assert [name for name in files if name not in printed] == []
    logs = "".join(text for name, text in files.items() if name.startswith("logs/"))
    for name, text in (
        ("docker/inspect.json", "VLLM_PLUGINS=spark_mxfp4"),
        ("docker/inspect.json", "MINE=…"),
        ("facts.json", "9.20.0.48"),
        ("doctor.json", '"invalid-resource-handle"'),
    ):
        assert text in files[name]
    assert 'File "<path>/site-packages/vllm/v1/engine/core.py", line 7' in logs
    assert "CUDA error: invalid resource handle" in logs


def test_the_same_evidence_gives_the_same_bytes_in_order_without_owner_or_time(tmp_path):
    collected = evidence.Evidence(facts={"b": 1, "a": 2}, documents={"z": {}, "y": {"k": 1}}, machine={"m": 1})
    places = [tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"]
    for location in places:
        doctor.write_archive(location, {"problems": []}, collected)
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


def test_a_long_log_is_kept_as_its_begin_and_its_end_in_whole_lines_and_a_short_one_whole():
    for data in (b"", b"x", b"a\nb", b"x" * evidence.TAIL):
        assert logged(data) == data
    assert b"x" not in logged(b"x" * 5_000_000)  # a single endless line
    data = b"".join(b"line %d HF_TOKEN=hf_secretsecret\n" % number for number in range(100_000))
    kept = logged(data)
    assert len(kept) < evidence.HEAD + evidence.TAIL + 100
    assert kept.startswith(b"line 0 ")
    assert kept.endswith(b"line 99999 HF_TOKEN=hf_secretsecret\n")
    assert b"bytes left out" in kept
    assert all(line.startswith((b"line ", b"[... ")) for line in kept.split(b"\n") if line)


@pytest.mark.slow
def test_many_logs_are_bounded(monkeypatch):
    def log(name, kind, number):
        large_log = evidence.Log(name, lambda: iter([b"text\n" * 1000]), kind=kind, written=float(number))
        list(large_log.chunks())
        return large_log

    units = [log(f"unit{number}.log", evidence.UNIT, number) for number in range(100)]
    collected = evidence.Evidence(logs=[log("server.log", evidence.EMBEDDED, 0), *units])
    names = {name for name in doctor.members({}, collected) if name.startswith("logs/")}
    assert len(names) == doctor.UNIT_LOGS + 1
    assert {"logs/unit99.log", "logs/server.log"} <= names
    monkeypatch.setattr(doctor, "MAX_TOTAL", 12_000)
    assert len([name for name in doctor.members({}, collected) if name.startswith("logs/")]) == 2


def test_names_in_the_archive_stay_in_its_folders():
    refused = {"c0ffee:/var/cache/sparkforge/state/refused.json": {}}
    collected = evidence.Evidence(reports=refused, documents={"../../etc/passwd": {}, "/": {}, "x\0y": {}})
    names = doctor.members({}, collected)
    assert "reports/c0ffee_refused.json" in names
    assert not [name for name in names if ".." in Path(name).parts or Path(name).is_absolute()]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("storage.access", r"support\.tar\.gz") as caught:
        doctor.write_archive(tmp_path / "file" / "support.tar.gz", {}, evidence.Evidence())
    assert caught.value.why == "File exists"
