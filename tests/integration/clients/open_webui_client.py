"""Recorded requests of Open WebUI 0.11.0, by the openai package: models, a streamed chat, its tasks, tools."""

import json

import conversations as c
import openai
from conversations import ANSWER, CALL, DONE, OSLO_CALL, Weather, equal, feature

TASK = """### Task:
Generate a concise title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Hi
ASSISTANT: Hello, %s
</chat_history>"""
client = openai.OpenAI(base_url=c.API, api_key=c.KEY, max_retries=0)


def deltas(messages, **options):
    """Return each field's concatenated text, and the calls by index."""
    fields, tools = {"content": "", "reasoning": ""}, {}
    for event in client.chat.completions.create(model=c.MODEL, messages=messages, stream=True, **options):
        for choice in event.choices:
            for name in fields:
                fields[name] += getattr(choice.delta, name, None) or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = tools.setdefault(call.index, ["", ""])
                tools[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
    return fields, list(tools.values())


@feature("models")
def _():
    (served,) = client.models.list().data
    equal((served.id, served.object, served.owned_by), (c.MODEL, "model", "vllm"))


@feature("chat")
def _():
    equal(deltas([{"role": "user", "content": ANSWER}])[0], {"content": DONE, "reasoning": c.THOUGHT})


@feature("titles, tags, follow-ups")
def _():
    messages = [{"role": "user", "content": TASK % c.JSON}]
    response = client.chat.completions.create(model=c.MODEL, messages=messages, stream=False, max_tokens=1000)
    content = response.choices[0].message.content
    equal(Weather.model_validate_json(content[content.index("{") : content.rindex("}") + 1]).city, "Oslo")


@feature("tools")
def _():
    messages = [{"role": "user", "content": CALL}]
    _, ((name, arguments),) = deltas(messages, tools=[c.TOOL])
    equal((name, json.loads(arguments)), OSLO_CALL)
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"7 degrees, says the {ANSWER}"},
    ]
    fields, calls = deltas(messages, tools=[c.TOOL])
    equal((fields["content"], calls), (DONE, []))


c.main()
