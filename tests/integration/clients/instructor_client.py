"""Instructor over the openai package: pydantic models by tools, by JSON schema and by JSON mode."""

import instructor
import openai
from conversations import API, JSON, KEY, MODEL, NAMED_CALL, TOKENS, WEATHER, Weather, equal, main


def extract(mode, cue):
    api = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": cue}]
    answer = instructor.from_openai(api, mode=mode).chat.completions.create(
        model=MODEL, messages=messages, response_model=Weather, max_retries=0, max_tokens=TOKENS, temperature=0
    )
    equal(answer.model_dump(), WEATHER.model_dump())


main({
    "tools": lambda: extract(instructor.Mode.TOOLS, NAMED_CALL),
    "JSON schema": lambda: extract(instructor.Mode.JSON_SCHEMA, JSON),
    "JSON mode": lambda: extract(instructor.Mode.JSON, JSON),
})  # fmt: skip
