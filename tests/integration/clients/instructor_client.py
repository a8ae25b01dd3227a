"""Instructor over the openai package: pydantic models by tools, by JSON schema and by JSON mode."""

from functools import partial

import instructor
import openai
from conversations import JSON, KEY, NAMED_CALL, TOKENS, Weather, equal, feature, main


def extract(url, model, mode, cue):
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": cue}]
    answer = instructor.from_openai(api, mode=mode).chat.completions.create(
        model=model, messages=messages, response_model=Weather, max_retries=0, max_tokens=TOKENS, temperature=0
    )
    equal(answer.model_dump(), {"city": "Oslo", "degrees": 7})


feature("tools")(partial(extract, mode=instructor.Mode.TOOLS, cue=NAMED_CALL))
feature("JSON schema")(partial(extract, mode=instructor.Mode.JSON_SCHEMA, cue=JSON))
feature("JSON mode")(partial(extract, mode=instructor.Mode.JSON, cue=JSON))
main()
