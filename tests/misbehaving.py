"""A small server that replaces vLLM: it has OpenAI's API and behaves or misbehaves as a test says.

`python misbehaving.py PORT BEHAVIOUR [JSON]` runs a process, `answering` a thread. JSON is [key, changes]: in answers
to requests with that key, the changes replace the choice.
"""

import json
import os
import sys
import threading
from contextlib import contextmanager

import fake_api
from loopback import Quiet

REFUSALS = {
    "cannot generate": (500, {"error": {"message": "no kernel image is available"}}),
    "answers a list": (200, ["hi"]),
    "answers null": (200, {"choices": [{"text": "hi"}], "usage": None}),
}


class Api(Quiet):
    def get(self):
        if self.path == "/end":  # as vLLM when its engine has died
            os._exit(0)
        self.reply(200 if self.server.behaviour != "unhealthy" else 503, {})

    def post(self):
        body = json.loads(self.body())
        if self.server.behaviour == "needs the key" and self.headers.get("Authorization") != "Bearer sesame":
            self.reply(401, {"error": {"message": "Unauthorized"}})
        elif body.get("stream") and body.get("messages", [{}])[0].get("content") == "hello":
            self.hello(self.server.behaviour)
        elif body.get("stream"):
            self.events(fake_api.stream_text(body))
        else:
            self.reply(*self.answer(body))

    def answer(self, body):
        behaviour, (key, changes) = self.server.behaviour, self.server.changes
        if behaviour in REFUSALS:
            return REFUSALS[behaviour]
        if behaviour.startswith("fails at ") and behaviour.removeprefix("fails at ") in body:
            return 500, {"error": {"message": "g++: not found"}}
        if behaviour == "keeps stop strings" and "tools" not in body:
            body.pop("stop", None)
        status, value = fake_api.answer(body)
        if behaviour == "lies":
            value = {**value, "usage": {"completion_tokens": 0}}
        if key in body and "choices" in value and "stop" not in body:
            value = {**value, "choices": [{**value["choices"][0], **changes}]}
        return status, value

    def events(self, text):
        self.stream()
        self.wfile.write(text.encode())

    def hello(self, behaviour):
        pieces = [{"role": "assistant"}, {"reasoning": "hm "}, {"content": "Hel"}, {"content": "lo"}]
        choices = [{"delta": piece} for piece in pieces] + [{"delta": {}, "finish_reason": "stop"}]
        events = [json.dumps({"choices": [choice]}) for choice in choices]
        if behaviour.startswith(("{", "[")):
            events.append(behaviour)
        if behaviour != "truncates":
            events.append("[DONE]")
        self.events("".join(f"data: {event}\n\n" for event in events))


class Server(fake_api.Server):
    """Listens on `port`; `changes` is (key, replacement of the choice)."""

    def __init__(self, port, behaviour="good", changes=("", {})):
        super().__init__(("127.0.0.1", port), Api)
        self.behaviour, self.changes = behaviour, changes


@contextmanager
def answering(*arguments):
    """Serve in a thread; yield the port."""
    with Server(0, *arguments) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port
        server.shutdown()


def main(port, behaviour="good", changes='["", {}]'):
    print("INFO 11-21 03:40:12 [core.py:1] Starting to load model x", flush=True)
    if behaviour == "dies":
        print("(EngineCore pid=7) ERROR 11-21 03:40:13 [core.py:99] RuntimeError: no such kernel", flush=True)
        sys.exit(1)
    Server(int(port), behaviour, json.loads(changes)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
