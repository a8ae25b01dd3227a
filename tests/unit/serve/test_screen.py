"""`chat`, `logs`, `status` and `doctor` print texts of servers and logs without terminal control sequences."""

import json
import re

import misbehaving
import pytest
from expected import refused
from servers import recorded

from sparkforge.core import console, paths
from sparkforge.core.errors import NetworkError
from sparkforge.doctor import doctor
from sparkforge.serve import conversation, record, status

UNSAFE = re.compile(f"[{console.UNSAFE}]")
EVIL = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b1m\u202e\rü"
PASSWORD = "https://anna:hunter2@mirror.example/simple/"


def test_the_answer_the_state_and_the_readiness_are_printed_without_escapes(capsys):
    events = [json.dumps({"choices": [{"delta": {"content": char}}]}) for char in f" {EVIL} World"]
    with misbehaving.answering("\n\ndata: ".join(events)) as port:
        served = recorded(port, model_id=f"name{EVIL}")
        conversation.Conversation(served, "", 10).ask("hello")
        out = capsys.readouterr().out
        assert out == "hm Hello \nü World\n"
        status.show_status(served)
        status.show_ready(served)
    out, err = capsys.readouterr()
    assert "healthy" in out
    assert not UNSAFE.search(out + err)


def test_logs_also_a_containers_are_printed_without_escapes(capsys, docker_command, fake_engine):
    record.log_path().parent.mkdir(parents=True, exist_ok=True)
    record.log_path().write_bytes(f"one {EVIL}\r\n".encode() + b"two \xff\xc3")
    status.show_log(follow=False)
    file = capsys.readouterr().out
    assert file.startswith("one \nü\ntwo \ufffd")
    docker_command.answers("logs", out=f"out {EVIL}\n", err=f"err {EVIL}\n")
    record.write(recorded(container="c0ffee"))
    status.show_log(follow=False)
    out = capsys.readouterr().out
    assert ("out " in out, "err " in out, UNSAFE.search(file + out)) == (True, True, None)


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_prints_a_log_without_escapes_and_passwords(tmp_path, capsys, as_json):
    log = tmp_path / "a.log"
    log.write_text(f"torch.OutOfMemoryError: CUDA out of memory. {EVIL} {PASSWORD}\n")
    with refused("validation.problems") as caught:
        doctor.main(log=str(log), state="", as_json=as_json, bundle="")
    console.show_error(caught.value)
    out, err = capsys.readouterr()
    assert "out of memory" in out
    assert not UNSAFE.search(out + err)
    assert "hunter2" not in out + err


def test_a_failure_is_written_for_its_owner_alone_and_without_passwords():
    with refused("network.fetch"), record.remembered():
        raise NetworkError("cannot find x", f"401 for url {PASSWORD}", f"curl {PASSWORD}", code="network.fetch")
    file = paths.state() / record.FAILURE
    assert file.stat().st_mode & 0o777 == 0o600
    assert "hunter2" not in file.read_text()
    assert record.read_failure(paths.state()).why == "401 for url https://***@mirror.example/simple/"
