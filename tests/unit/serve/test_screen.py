"""`chat`, `logs`, `status` and `doctor` print what a server and a log say, and nothing that a terminal obeys."""

import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sparkforge.core import console, paths
from sparkforge.core.errors import NetworkError, RefusalError, ServerError
from sparkforge.core.process import started_at
from sparkforge.doctor import doctor
from sparkforge.serve import conversation, failure, record, screen

UNSAFE = re.compile(f"[{console.UNSAFE}]")
EVIL = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b1m\u202e\rü"
PASSWORD = "https://anna:hunter2@mirror.example/simple/"


class Model(BaseHTTPRequestHandler):
    """Answers as vLLM does, one character of an evil text in each event."""

    refusal = ""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        if self.refusal:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": self.refusal}}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for char in f"Hello {EVIL} World":
            event = {"choices": [{"delta": {"content": char}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def served():
    """A recorded server whose process is this test's, with a model behind it."""
    http = HTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    record.log_path().parent.mkdir(parents=True, exist_ok=True)
    server = record.Server(
        pid=os.getpid(), started=started_at(os.getpid()), host="127.0.0.1", port=http.server_port, model="m",
        model_id=f"name{EVIL}", device="embedded", log=str(record.log_path()),
    )  # fmt: skip
    yield server
    http.shutdown()
    http.server_close()


def test_chat_prints_the_answer_without_its_escapes(served, capsys):
    conversation.answer_once(served, "hi", 10)
    out = capsys.readouterr().out
    assert not UNSAFE.search(out)
    assert out == "Hello \nü World\n"


def test_a_refusal_is_shown_without_its_escapes(served, capsys, monkeypatch):
    monkeypatch.setattr(Model, "refusal", EVIL)
    with pytest.raises(ServerError, check=lambda error: error.code == "server.reply") as caught:
        conversation.answer_once(served, "hi", 10)
    console.show_error(caught.value)
    assert not UNSAFE.search(capsys.readouterr().err)


def test_status_and_readiness_are_printed_without_escapes(served, capsys):
    screen.show_status(served)
    screen.show_ready(served)
    out, err = capsys.readouterr()
    assert "healthy" in out
    assert not UNSAFE.search(out + err)


def test_logs_are_printed_without_escapes(capsys):
    record.log_path().parent.mkdir(parents=True, exist_ok=True)
    record.log_path().write_bytes(f"one {EVIL}\r\n".encode() + b"two \xff\xc3")
    screen.show_log(follow=False)
    out = capsys.readouterr().out
    assert not UNSAFE.search(out)
    assert out.startswith("one \nü\ntwo \ufffd")


def test_a_character_that_is_written_in_two_parts_is_printed_whole(monkeypatch, tmp_path):
    from sparkforge.serve import logs

    log, parts = tmp_path / "log", [b"ma\xc3", b"\xbc", b"\xe6\xbc", b"\xa2"]
    log.write_bytes(b"")

    def alive():
        """Another part is written before each look at the log."""
        if not parts:
            return False
        with log.open("ab") as file:
            file.write(parts.pop(0))
        return True

    assert "".join(logs.follow(log, alive)) == "maü漢"


def test_a_containers_log_is_printed_without_escapes(served, docker_command, capsys):
    docker_command.answers("logs", out=f"out {EVIL}\n", err=f"err {EVIL}\n")
    screen._container_log(record.Server(**{**vars(served), "container": "c0ffee"}), follow=False)
    out = capsys.readouterr().out
    assert "out " in out
    assert "err " in out
    assert not UNSAFE.search(out)


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_prints_a_log_without_escapes_and_passwords(tmp_path, capsys, as_json):
    log = tmp_path / "a.log"
    log.write_text(f"torch.OutOfMemoryError: CUDA out of memory. {EVIL} {PASSWORD}\n")
    with pytest.raises(RefusalError, check=lambda error: error.code == "validation.problems") as caught:
        doctor.main(log=str(log), state="", as_json=as_json, bundle="")
    console.show_error(caught.value)
    out, err = capsys.readouterr()
    assert "out of memory" in out
    assert not UNSAFE.search(out + err)
    assert "hunter2" not in out + err


def test_a_failure_is_written_for_its_owner_alone_and_without_passwords():
    with pytest.raises(NetworkError, check=lambda error: error.code == "network.fetch"), failure.remembered():
        raise NetworkError("cannot find x", f"401 for url {PASSWORD}", f"curl {PASSWORD}", code="network.fetch")
    file = paths.state() / failure.NAME
    assert file.stat().st_mode & 0o777 == 0o600
    assert "hunter2" not in file.read_text()
    assert failure.read(paths.state()).why == "401 for url https://***@mirror.example/simple/"
