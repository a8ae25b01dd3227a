"""The health check against real sockets."""

import json
import socket

import misbehaving
import pytest

from sparkforge.serve import health as healthy


@pytest.fixture
def ready(tmp_path):
    def ready(host, port):
        (tmp_path / "ready").write_text(json.dumps({"host": host, "port": port}))
        return tmp_path

    return ready


def test_a_validated_server_that_answers_is_healthy(ready, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with misbehaving.answering() as port:
        monkeypatch.setenv("SPARKFORGE_RUN", str(ready("127.0.0.1", port)))
        assert healthy.main() == 0
    assert capsys.readouterr().out == "healthy\n"


def test_a_worker_without_an_api_is_healthy_and_a_server_without_readiness_is_not(ready, tmp_path):
    assert "validation has not passed" in healthy.look(tmp_path)
    assert healthy.look(ready("127.0.0.1", 0)) == ""


@pytest.mark.parametrize("text", ["[]", '{"host": "127.0.0.1", "port": "x"}', "\udcff"])
def test_a_broken_readiness_file_is_not_healthy(tmp_path, text):
    (tmp_path / "ready").write_bytes(text.encode(errors="surrogateescape"))
    assert "cannot read" in healthy.look(tmp_path)


def test_a_server_that_does_not_answer_well_is_not_healthy(ready, monkeypatch):
    monkeypatch.setattr(healthy, "SECONDS", 0.2)
    with misbehaving.answering("unhealthy") as port:
        assert healthy.look(ready("127.0.0.1", port)).endswith("answered 503")
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as silent:
        bound.bind(("127.0.0.1", 0))  # not listening
        for address in (bound.getsockname(), silent.getsockname()):
            assert "does not answer" in healthy.look(ready(*address))
