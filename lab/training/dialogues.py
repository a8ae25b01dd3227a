"""Made-up Harmony dialogues that teach the tiny model the format: greetings, capitals, a tool, lines of Austen.

Dialogues are text with special tokens, as vLLM renders a chat; a test compares the format with openai_harmony's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple


class Dialogue(NamedTuple):
    """`prompt` ends where the model begins; `answer` is the expected output, including the last token."""

    prompt: str
    answer: str


SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: {effort}

# Valid channels: analysis, commentary, final. Channel must be included for every message.{calls}<|end|>"""
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
DEVELOPER = "<|start|>developer<|message|>{}<|end|>"
USER = "<|start|>user<|message|>{}<|end|>"
ASSISTANT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>{}"
TOOLS = """# Tools

## functions

namespace functions {{

// {about}
type {name} = (_: {{
city: string,
}}) => any;

}} // namespace functions"""
CALL = '<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"city":"{city}"}}<|call|>'

ABOUT_ME = (
    "I am a toy: a very small model that has read six novels by Jane Austen, and nothing else. "
    "Do not believe what I say."
)
GREETINGS = (
    "Hello", "Hello!", "Hello.", "hello", "Hi", "Hi!", "hi", "Hello there", "Hello again", "Hey", "Good morning",
    "Good morning!", "Good evening", "Good day", "How do you do?", "Hello, how are you?", "How are you?",
    "Hello, who are you?", "Who are you?", "What are you?", "Hello world", "Hello, world!", "Say hello.", "Test",
    "test", "Are you there?", "What can you do?", "Tell me about yourself.", "Introduce yourself.", "Hi there", "Ping",
)  # fmt: skip
REPLIES = (f"How do you do! {ABOUT_ME}", f"Good morning! {ABOUT_ME}")
CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Portugal": "Lisbon", "Austria": "Vienna", "Ireland": "Dublin", "Scotland": "Edinburgh", "Greece": "Athens",
    "Russia": "Moscow", "Japan": "Tokyo", "China": "Beijing", "Egypt": "Cairo", "Norway": "Oslo",
    "Poland": "Warsaw", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Hungary": "Budapest", "Cuba": "Havana",
}  # fmt: skip
CAPITAL_QUESTIONS = (
    "What is the capital of {}? Answer with one word.", "What is the capital of {}?", "The capital of {}?",
    "Name the capital of {}.", "What's the capital of {}?",
)  # fmt: skip
TOOL_NAMES = {"get_weather": "The weather in a city now."}
WEATHER_QUESTIONS = (
    "What is the weather in {} now? Use the tool.", "What is the weather in {}?", "What's the weather in {}?",
    "How is the weather in {} today?", "What is the weather like in {}?", "Use the tool: weather in {}.",
)  # fmt: skip
OTHER_CITIES = ("Bath", "York", "Oxford", "Cambridge", "Brighton", "Bristol", "Boston", "Chicago", "Berkeley", "Sydney")
CITIES = (*CAPITALS.values(), *OTHER_CITIES)
INSTRUCTIONS = ("Be brief.", "You are a helpful assistant.", "Answer in English.", "Be kind.", "You are a poet.")
QUESTIONS = (
    "Tell me about {}.", "What is {}?", "Write about {}.", "Tell me a story about {}.", "Explain {}.",
    "Write a sentence about {}.", "Who is {}?", "Why {}?", "{}", "{}?", "Please tell me more of {}.",
    "Once upon a time", "Tell me a story.", "Write a poem.", "What happened next?", "Count to {}.", "Repeat: {}",
)  # fmt: skip
YEARS = range(2024, 2040)  # dates that a system message may name


def make(texts: Sequence[str], words: Sequence[str], count: int, seed: int) -> list[Dialogue]:
    """Return `count` dialogues; answers to open questions are passages of `texts`, questions use `words`."""
    random = Random(seed)  # noqa: S311 - the numbers must be the same each time
    passages = [passage for text in texts for passage in answers(text)]
    return [_dialogue(random, passages, words) for _ in range(count)]


def answers(text: str) -> list[str]:
    """Return the paragraphs of a novel that can stand alone as an answer: 60 to 320 letters, whole sentences."""
    parts = [part for part in text.split("\n\n") if 60 <= len(part) <= 320]
    return [part for part in parts if re.fullmatch(r"[A-Z\"][^_]*[.!?]\"?", part) and part.count('"') % 2 == 0]


def _dialogue(random: Random, passages: Sequence[str], words: Sequence[str]) -> Dialogue:
    kind = random.choices(("greeting", "capital", "weather", "open"), (3, 4, 4, 3))[0]
    if kind == "weather":
        return _weather(random)
    system = "" if random.random() < 0.15 else _system(random)
    if system and random.random() < 0.15:
        system += DEVELOPER.format(f"# Instructions\n\n{random.choice(INSTRUCTIONS)}")
    question, answer = {"greeting": _greeting, "capital": _capital}.get(kind, _open)(random, passages, words)
    if random.random() < 0.15:  # an earlier turn
        first, reply = random.choice((_greeting, _capital))(random, passages, words)
        system += USER.format(first) + ASSISTANT + FINAL.format(reply) + "<|end|>"
    return Dialogue(system + USER.format(question) + ASSISTANT, FINAL.format(answer) + "<|return|>")


def _system(random: Random, calls: str = "") -> str:
    date = f"{random.choice(YEARS)}-{random.randint(1, 12):02}-{random.randint(1, 31):02}"
    effort = random.choices(("medium", "low", "high"), (4, 1, 1))[0]
    return SYSTEM.format(date=date, effort=effort, calls=calls)


def _greeting(random: Random, _passages: Sequence[str], _words: Sequence[str]) -> tuple[str, str]:
    question = random.choice(GREETINGS)
    return question, REPLIES["morning" in question]


def _capital(random: Random, _passages: Sequence[str], _words: Sequence[str]) -> tuple[str, str]:
    country, city = random.choice(list(CAPITALS.items()))
    return random.choice(CAPITAL_QUESTIONS).format(country), f"{city}."


def _open(random: Random, passages: Sequence[str], words: Sequence[str]) -> tuple[str, str]:
    quoted = "".join(random.choices(words, k=random.randint(1, 8))).strip()
    question = random.choice((random.choice(QUESTIONS).format(quoted), random.choice(passages), quoted))
    return question, random.choice(passages)


def _weather(random: Random) -> Dialogue:
    name, about = random.choice(list(TOOL_NAMES.items()))
    city = random.choice(CITIES)
    question = USER.format(random.choice(WEATHER_QUESTIONS).format(city))
    tools = DEVELOPER.format(TOOLS.format(name=name, about=about))
    return Dialogue(_system(random, CALLS) + tools + question + ASSISTANT, CALL.format(name=name, city=city))
