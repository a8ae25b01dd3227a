"""`./inv chat` on a terminal, in a pipe, and with one message; a small server answers by script."""

import io
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from loopback import Quiet, serving
from terminal import Terminal

from sparkforge.cli import program
from sparkforge.core.paths import ROOT, state
from sparkforge.core.process import started_at
from sparkforge.serve import record

CHAT = (sys.executable, "-m", "sparkforge.cli", "chat")


class Model(Quiet):
    def post(self):
        body = json.loads(self.body())
        self.server.asked.append(body)
        text = body["messages"][-1]["content"]
        if text == "refuse":
            return self.reply(400, {"error": {"message": "the context is full"}})
        self.stream()
        self.event({"reasoning": "hm"})
        if text != "only reasoning":
            self.event({"content": f"answer {len(self.server.asked)}"})
        if text == "endless":
            while True:  # until the client closes the connection
                self.event({"content": "."})
                time.sleep(0.02)
        self.event({}, "length" if text in {"long", "only reasoning"} else "stop")
        return self.wfile.write(b"data: [DONE]\n\n")

    def event(self, delta, reason=None):
        choice = {"delta": delta, "finish_reason": reason}
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def handle(self):
        try:
            super().handle()
        except OSError:
            self.server.closed.set()


@pytest.fixture
def served():
    state().mkdir(exist_ok=True, mode=0o700)
    environment, pid = {**os.environ, "SPARKFORGE_STATE": str(state())}, os.getpid()
    with serving(Model, asked=[], closed=threading.Event()) as server:
        record.write(record.Server(pid, started_at(pid), "127.0.0.1", server.server_port, "/m", "m", "embedded", ""))
        yield SimpleNamespace(environment=environment, asked=server.asked, closed=server.closed)


@pytest.fixture
def talk(served):
    started = []

    def talk(*options):
        started.append(Terminal(*CHAT, *options, cwd=ROOT, env=served.environment))
        started[-1].expect("> ")
        return started[-1]

    yield talk
    for terminal in started:
        terminal.close()


def messages(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_a_conversation_remembers_what_was_said(talk, served):
    terminal = talk("--system", "be brief")
    terminal.type("first\r")
    terminal.expect("answer 1")
    terminal.expect("> ")
    for number, message in enumerate(("second", "third"), 2):
        terminal.type(f"{message}\r")
        terminal.expect(f"answer {number}")
        terminal.expect("> ")
    first = [("system", "be brief"), ("user", "first")]
    assert messages(served.asked[0]) == first
    second = [*first, ("assistant", "answer 1"), ("user", "second")]
    assert messages(served.asked[1]) == second
    assert messages(served.asked[2]) == [*second, ("assistant", "answer 2"), ("user", "third")]
    assert served.asked[1]["max_tokens"] == 1024
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_ends_the_answer_and_not_the_conversation(talk, served):
    terminal = talk()
    terminal.type("endless\r")
    terminal.expect("answer 1..")
    terminal.type("\x03")
    terminal.expect("the answer was ended by Ctrl-C")
    terminal.expect("> ")
    assert served.closed.wait(60), "the server goes on with an answer that nobody reads"
    terminal.type("\x03")
    terminal.expect("Ctrl-D")
    terminal.expect("> ")
    terminal.type("next\r")
    terminal.expect("answer 2")
    terminal.expect("> ")
    kept = messages(served.asked[1])
    assert kept[0] == ("user", "endless")
    assert kept[1][1].startswith("answer 1.")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_refused_empty_and_cut_answers_are_reported(talk, served):
    terminal = talk("--max-tokens", "9")
    terminal.type("refuse\r")
    terminal.expect("the context is full")
    terminal.expect("> ")
    terminal.type("only reasoning\r")
    terminal.expect("the answer was cut: --max-tokens is 9")
    terminal.expect("> ")
    terminal.type("long\r")
    terminal.expect("answer 3")
    terminal.expect("the answer was cut: --max-tokens is 9")
    terminal.expect("> ")
    assert messages(served.asked[2]) == [("user", "long")]
    assert terminal.end(again=signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("options", "stdin"), [(("hello",), "not read"), ((), "hello")])
def test_a_message_is_an_argument_or_stdin(served, monkeypatch, capsys, options, stdin):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert program.main(["chat", *options]) == 0
    assert capsys.readouterr() == ("hmanswer 1\n", "")
    assert messages(served.asked[0]) == [("user", "hello")]
    assert served.asked[0]["max_tokens"] == 64
