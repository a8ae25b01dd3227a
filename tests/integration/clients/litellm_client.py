"""LiteLLM with its provider for vLLM: chat, stream, tools, structured outputs."""

import conversations as c
import litellm
from conversations import ANSWER, CALL, DONE, JSON, WEATHER, Weather, equal


def chat(cue, **options):
    return litellm.completion(
        model=f"hosted_vllm/{c.MODEL}", api_base=c.API, api_key=c.KEY, messages=[{"role": "user", "content": cue}],
        max_tokens=c.TOKENS, temperature=0, num_retries=0, **options,
    )  # fmt: skip


def message(cue, **options):
    return chat(cue, **options).choices[0].message


def calls(choice):
    (call,) = message(CALL, tools=[c.TOOL], tool_choice=choice).tool_calls
    equal((call.function.name, call.function.arguments), ("weather", '{"city": "Oslo"}'))


def stream():
    equal("".join(event.choices[0].delta.content or "" for event in chat(ANSWER, stream=True)), DONE)


c.main({
    "chat": lambda: equal(message(ANSWER).content, DONE),
    "reasoning": lambda: equal(message(ANSWER).reasoning_content, c.THOUGHT),
    "stream": stream,
    "tools": lambda: calls("auto"),
    "tools: named": lambda: calls(c.NAMED),
    "structured outputs": lambda: equal(
        Weather.model_validate_json(message(JSON, response_format=Weather).content), WEATHER),
})  # fmt: skip
