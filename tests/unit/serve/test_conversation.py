"""`./inv chat` on a terminal, in a pipe, and with one message; a small server answers by script."""

import io
import json
import os
import signal
import sys
import threading
import time

import pytest
from loopback import Quiet, serving
from servers import recorded
from terminal import Terminal

from sparkforge.cli import program
from sparkforge.core.errors import UsageError
from sparkforge.core.paths import ROOT
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
    with serving(Model, asked=[], closed=threading.Event()) as server:
        record.write(recorded(server.server_port))
        yield server


@pytest.fixture
def talk(served):
    """Return a function that starts a chat; it returns one that types a line and waits for texts and the prompt."""
    started = []

    def talk(*options):
        terminal = Terminal(*CHAT, *options, cwd=ROOT, env=os.environ)
        started.append(terminal)
        terminal.expect("> ")

        def say(line, *answers):
            terminal.type(f"{line}\r")
            for text in (*answers, "> "):
                terminal.expect(text)

        return terminal, say

    yield talk
    for terminal in started:
        terminal.close()


def messages(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_a_conversation_remembers_what_was_said(talk, served):
    terminal, say = talk("--system", "be brief")
    for number, message in enumerate(("first", "second", "third"), 1):
        say(message, f"answer {number}")
    first = [("system", "be brief"), ("user", "first")]
    assert messages(served.asked[0]) == first
    second = [*first, ("assistant", "answer 1"), ("user", "second")]
    assert messages(served.asked[1]) == second
    assert messages(served.asked[2]) == [*second, ("assistant", "answer 2"), ("user", "third")]
    assert served.asked[1]["max_tokens"] == 1024
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_ends_the_answer_and_not_the_conversation(talk, served):
    terminal, say = talk()
    terminal.type("endless\r")
    terminal.expect("answer 1..")
    terminal.type("\x03")
    terminal.expect("the answer was ended by Ctrl-C")
    terminal.expect("> ")
    assert served.closed.wait(60), "the server goes on with an answer that nobody reads"
    terminal.type("\x03")
    terminal.expect("Ctrl-D")
    terminal.expect("> ")
    say("next", "answer 2")
    kept = messages(served.asked[1])
    assert kept[0] == ("user", "endless")
    assert kept[1][1].startswith("answer 1.")


def test_refused_empty_and_cut_answers_are_reported(talk, served):
    terminal, say = talk("--max-tokens", "9")
    say("refuse", "the context is full")
    say("only reasoning", "the answer was cut: --max-tokens is 9")
    say("long", "answer 3", "the answer was cut: --max-tokens is 9")
    assert messages(served.asked[2]) == [("user", "long")]
    assert terminal.end(again=signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "stdin", "said"),
    [(["hello"], "not read", "hmanswer 1\n"), ([], "hello", "hmanswer 1\n"), ([], " \n", "it is empty")],
)
def test_a_message_is_an_argument_or_stdin(served, monkeypatch, capsys, options, stdin, said):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert program.main(["chat", *options]) == (0 if stdin.strip() else UsageError.exit_code)
    assert said in "".join(capsys.readouterr())
    asked = [(messages(body), body["max_tokens"]) for body in served.asked]
    assert asked == ([([("user", "hello")], 64)] if stdin.strip() else [])
