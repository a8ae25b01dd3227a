"""The scripted model's output for each cue, and the runner of a client's script.

`python NAME_client.py URL MODEL` prints its features as JSON: name → what went wrong, or nothing. A feature is a
function without arguments: a long one is marked by `feature`, the others are given to `main`.
"""

import json
import os
import sys

from pydantic import BaseModel

URL, MODEL = [*sys.argv, "", ""][1:3]
API = f"{URL}/v1"
WORDS = "I have a toy and a book."
ANSWER, THOUGHT, DONE = "apple", "Let me think.", "All done."
TOY, JSON, FINAL_JSON, CALL, SECOND_CALL, TWO_CALLS, NAMED_CALL = (
    "river", "stone", "cloud", "glass", "metal", "paper", "bread",
)  # fmt: skip
OSLO = '{"city": "Oslo", "degrees": 7}'
# Cue → what the model writes after `<|start|>assistant` (sparkforge/models/scripted.py). Real gpt-oss writes JSON
# answers as `<|constrain|>json` or as `final json`.
SCRIPTS = {
    ANSWER: f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    f"<|channel|>final<|message|>{DONE}<|return|>",
    TOY: f"<|channel|>final<|message|>{WORDS}<|return|>",
    JSON: f"<|channel|>final <|constrain|>json<|message|>{OSLO}<|return|>",
    FINAL_JSON: f"<|channel|>final json<|message|>{OSLO}<|return|>",
    CALL: ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
    SECOND_CALL: '<|channel|>commentary to=functions.weather json<|message|>{"city": "Rome"}<|call|>',
    TWO_CALLS: '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|end|>'
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
    NAMED_CALL: f" to=functions.Weather<|channel|>commentary json<|message|>{OSLO}<|call|>",
}
# Tool of an agent → the cue that makes the model call it, and the call's arguments.
AGENT = {
    "read_file": ("silver", {"path": "notes.md"}), "write_file": ("castle", {"path": "out.md", "text": "Hello"}),
    "list_files": ("garden", {"path": "/tmp"}), "run": ("window", {"command": "ls", "seconds": 5}),
    "search": ("summer", {"query": "sliding"}), "fetch": ("winter", {"url": "https://example.com"}),
    "add_task": ("orange", {"title": "Write it"}), "end_task": ("button", {"number": 3}),
}  # fmt: skip
SCRIPTS |= {
    cue: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
    for name, (cue, arguments) in AGENT.items()
}
TOKENS = 100
TYPES = {str: "string", int: "integer"}
KEY = os.environ.get("OPENAI_API_KEY", "")  # of the server
OSLO_CALL = ("weather", {"city": "Oslo"})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather now.", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FEATURES = {}
TURNS = int(os.environ.get("AGENT_TURNS", "8"))  # of an agent
AGENT_SCHEMAS = {
    name: {
        "type": "object",
        "properties": {key: {"type": TYPES[type(value)]} for key, value in arguments.items()},
        "required": list(arguments),
    }
    for name, (_, arguments) in AGENT.items()
}


class Weather(BaseModel):
    city: str
    degrees: int


WEATHER = Weather(city="Oslo", degrees=7)


def feature(name):
    return lambda function: FEATURES.setdefault(name, function)


def equal(value, wanted):
    if value != wanted:
        raise AssertionError(f"{value!r} instead of {wanted!r}")


def work(step):
    """Run an agent for TURNS turns: each tool result has the cue of the next call, the last the cue of the answer.

    `step` takes the text for the model, and whether to cancel a first try; it returns the model's call or answer.
    """
    order = [list(AGENT)[(turn * 5 + turn // 8) % len(AGENT)] for turn in range(TURNS)]
    cues = [*(AGENT[name][0] for name in order), ANSWER]
    answers = [step(f"Turn {turn} is next: use the {cue} now, please.", turn % 4 == 3) for turn, cue in enumerate(cues)]
    equal(answers, [*((name, AGENT[name][1]) for name in order), DONE])


def raises(error, function):
    try:
        value = function()
    except error:
        return
    raise AssertionError(f"{value!r} instead of {error.__name__}")


def main(features=None):
    outcome = {}
    for name, function in (FEATURES | (features or {})).items():
        try:
            function()
            outcome[name] = ""
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its outcome
            outcome[name] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(outcome))
