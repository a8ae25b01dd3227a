"""Claude Code's requests, by the anthropic package: cached system blocks, tools, thinking, a stream, tool results."""

import anthropic
import conversations as c
from conversations import ANSWER, CALL, DONE, OSLO_CALL, equal, feature

CACHED = {"cache_control": {"type": "ephemeral"}}
TODO = {"type": "object", "properties": {
    "content": {"type": "string", "minLength": 1}, "status": {"enum": ["pending", "completed"]}}}  # fmt: skip
TOOLS = [
    {"name": "weather", "description": "The weather now.", "input_schema": c.SCHEMA},
    {"name": "TodoWrite", "description": "Write the list of tasks.", **CACHED, "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "required": ["todos"],
        "properties": {"todos": {"type": "array", "items": TODO}}, "additionalProperties": False}},
]  # fmt: skip
SYSTEM = [{"type": "text", "text": "You are an agent of a terminal."}, {"type": "text", "text": "Be brief.", **CACHED}]
client = anthropic.Anthropic(base_url=c.URL, auth_token=c.KEY, max_retries=0)


def ask(messages, **options):
    options = {
        "system": SYSTEM, "tools": TOOLS, "max_tokens": 32000, "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "extra_headers": {"anthropic-beta": "x-2025-01-01"},
        **options,
    }  # fmt: skip
    with client.messages.stream(model=c.MODEL, messages=messages, **options) as stream:
        return stream.get_final_message()


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text, **CACHED}]}


def texts(message):
    return [block.text for block in message.content if block.type == "text"]


@feature("stream with thinking and tools, two turns")
def _():
    turns = [user(f"<system-reminder>Today is Monday.</system-reminder>{CALL}")]
    first = ask(turns)
    (call,) = (block for block in first.content if block.type == "tool_use")
    equal((call.name, call.input, first.stop_reason), (*OSLO_CALL, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": False,
              "content": [{"type": "text", "text": f"7 degrees, says the {ANSWER}"}]}  # fmt: skip
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    equal(texts(ask(turns)), [DONE])


@feature("adaptive thinking with effort")
def _():
    options = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}
    equal(texts(ask([user(ANSWER)], **options)), [DONE])


@feature("count_tokens, agent: eight tools, cancelled and tried again")
def _():
    """Tokens are counted before each request; the count equals the usage of the answer."""
    tools = [{"name": name, "description": name, "input_schema": schema} for name, schema in c.AGENT_SCHEMAS.items()]
    turns = []

    def step(text, cancelled):
        call = next((block for block in turns[-1]["content"] if block.type == "tool_use"), None) if turns else None
        result = {"type": "tool_result", "tool_use_id": call.id, "content": text} if call else None
        turns.append({"role": "user", "content": [result]} if result else user(text))
        request = {"model": c.MODEL, "messages": turns, "system": SYSTEM, "tools": tools}
        count = client.messages.count_tokens(**request)
        if cancelled:
            with client.messages.stream(**request, max_tokens=2000) as stream:
                next(iter(stream))
        message = ask(turns, tools=tools)
        equal(count.input_tokens, message.usage.input_tokens)
        turns.append({"role": "assistant", "content": message.content})
        (block,) = (block for block in message.content if block.type != "thinking")
        return (block.name, block.input) if block.type == "tool_use" else block.text

    c.work(step)


c.main()
