"""LiteLLM with its provider for vLLM: chat, stream, tools, structured outputs."""

import litellm
from conversations import ANSWER, CALL, DONE, JSON, KEY, NAMED, THOUGHT, TOKENS, TOOL, Weather, equal, feature, main


def chat(url, model, cue, **options):
    messages = [{"role": "user", "content": cue}]
    return litellm.completion(
        model=f"hosted_vllm/{model}", api_base=f"{url}/v1", api_key=KEY, messages=messages, max_tokens=TOKENS,
        temperature=0, num_retries=0, **options,
    )  # fmt: skip


@feature("chat")
def _(url, model):
    equal(chat(url, model, ANSWER).choices[0].message.content, DONE)


@feature("reasoning")
def _(url, model):
    equal(chat(url, model, ANSWER).choices[0].message.reasoning_content, THOUGHT)


@feature("stream")
def _(url, model):
    events = chat(url, model, ANSWER, stream=True)
    equal("".join(event.choices[0].delta.content or "" for event in events), DONE)


@feature("tools")
def _(url, model):
    (call,) = chat(url, model, CALL, tools=[TOOL], tool_choice="auto").choices[0].message.tool_calls
    equal((call.function.name, call.function.arguments), ("weather", '{"city": "Oslo"}'))


@feature("tools: named")
def _(url, model):
    (call,) = chat(url, model, CALL, tools=[TOOL], tool_choice=NAMED).choices[0].message.tool_calls
    equal((call.function.name, call.function.arguments), ("weather", '{"city": "Oslo"}'))


@feature("structured outputs")
def _(url, model):
    content = chat(url, model, JSON, response_format=Weather).choices[0].message.content
    equal(Weather.model_validate_json(content), Weather(city="Oslo", degrees=7))


main()
