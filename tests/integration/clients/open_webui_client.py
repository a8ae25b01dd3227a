"""Recorded requests of Open WebUI 0.11.0, by the openai package: models, a streamed chat, its tasks, tools."""

import json

import openai
from conversations import ANSWER, CALL, DONE, JSON, KEY, THOUGHT, TOOL, Weather, equal, feature, main

TASK = """### Task:
Generate a concise title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Hi
ASSISTANT: Hello, %s
</chat_history>"""


def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def deltas(url, model, messages, **options):
    """Return each field's concatenated text, and the calls by index."""
    fields = {"content": "", "reasoning": ""}
    tools: dict[int, list[str]] = {}
    for event in client(url).chat.completions.create(model=model, messages=messages, stream=True, **options):
        for choice in event.choices:
            for name in fields:
                fields[name] += getattr(choice.delta, name, None) or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = tools.setdefault(call.index, ["", ""])
                tools[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
    return fields, list(tools.values())


@feature("models")
def _(url, model):
    (served,) = client(url).models.list().data
    equal((served.id, served.object, served.owned_by), (model, "model", "vllm"))


@feature("chat")
def _(url, model):
    fields, _ = deltas(url, model, [{"role": "user", "content": ANSWER}])
    equal(fields, {"content": DONE, "reasoning": THOUGHT})


@feature("titles, tags, follow-ups")
def _(url, model):
    messages = [{"role": "user", "content": TASK % JSON}]
    response = client(url).chat.completions.create(model=model, messages=messages, stream=False, max_tokens=1000)
    content = response.choices[0].message.content
    equal(Weather.model_validate_json(content[content.index("{") : content.rindex("}") + 1]).city, "Oslo")


@feature("tools")
def _(url, model):
    messages = [{"role": "user", "content": CALL}]
    _, ((name, arguments),) = deltas(url, model, messages, tools=[TOOL])
    equal((name, json.loads(arguments)), ("weather", {"city": "Oslo"}))
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"7 degrees, says the {ANSWER}"},
    ]
    fields, calls = deltas(url, model, messages, tools=[TOOL])
    equal((fields["content"], calls), (DONE, []))


main()
