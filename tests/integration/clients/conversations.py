"""What the scripted model writes for each cue, and how a client's script is run.

`python NAME_client.py URL MODEL` prints its features as JSON: name → what went wrong, or nothing.
"""

import json
import os
import sys
from collections.abc import Callable

from pydantic import BaseModel

WORDS = "I have a toy and a book."
ANSWER, THOUGHT, DONE = "apple", "Let me think.", "All done."
TOY, JSON, FINAL_JSON, CALL, SECOND_CALL, TWO_CALLS, NAMED_CALL = (
    "river", "stone", "cloud", "glass", "metal", "paper", "bread",
)  # fmt: skip
OSLO = '{"city": "Oslo", "degrees": 7}'
# Cue → what the model writes behind `<|start|>assistant` (sparkforge/models/scripted.py). Real gpt-oss writes JSON
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
TOKENS = 100
KEY = os.environ.get("OPENAI_API_KEY", "")  # of the server
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather now.", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FEATURES = {}


class Weather(BaseModel):
    """The weather in a city now."""

    city: str
    degrees: int


def feature(name: str) -> Callable:
    """Register a function of the API's URL and the model's name, which raises if the feature does not work."""

    def register(function: Callable) -> Callable:
        FEATURES[name] = function
        return function

    return register


def equal(value: object, wanted: object) -> None:
    """Raise AssertionError, with both values, unless they are equal."""
    if value != wanted:
        raise AssertionError(f"{value!r} instead of {wanted!r}")


def raises(error: type[Exception], function: Callable) -> None:
    """Raise AssertionError unless the function raises `error`."""
    try:
        value = function()
    except error:
        return
    raise AssertionError(f"{value!r} instead of {error.__name__}")


def main() -> None:
    """Run every feature and print what came of it."""
    url, model = sys.argv[1:]
    outcome = {}
    for name, function in FEATURES.items():
        try:
            function(url, model)
            outcome[name] = ""
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its outcome
            outcome[name] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(outcome))
