"""Claude Code's requests, by the anthropic package: cached system blocks, tools, thinking, a stream, tool results."""

import anthropic
from conversations import AGENT_SCHEMAS, ANSWER, CALL, DONE, KEY, SCHEMA, equal, feature, main, work

CACHED = {"cache_control": {"type": "ephemeral"}}
TOOLS = [
    {"name": "weather", "description": "The weather now.", "input_schema": SCHEMA},
    {
        "name": "TodoWrite",
        "description": "Write the list of tasks.",
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"todos": {"type": "array", "items": {"type": "object", "properties": {
                "content": {"type": "string", "minLength": 1}, "status": {"enum": ["pending", "completed"]}}}}},
            "required": ["todos"],
            "additionalProperties": False,
        },
        **CACHED,
    },
]  # fmt: skip
SYSTEM = [{"type": "text", "text": "You are an agent of a terminal."}, {"type": "text", "text": "Be brief.", **CACHED}]


def ask(url, model, messages, **options):
    client = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
    options = {
        "system": SYSTEM, "tools": TOOLS, "max_tokens": 32000, "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "extra_headers": {"anthropic-beta": "x-2025-01-01"},
        **options,
    }  # fmt: skip
    with client.messages.stream(model=model, messages=messages, **options) as stream:
        return stream.get_final_message()


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text, **CACHED}]}


@feature("stream with thinking and tools, two turns")
def _(url, model):
    turns = [user(f"<system-reminder>Today is Monday.</system-reminder>{CALL}")]
    first = ask(url, model, turns)
    (call,) = (block for block in first.content if block.type == "tool_use")
    equal((call.name, call.input, first.stop_reason), ("weather", {"city": "Oslo"}, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": False,
              "content": [{"type": "text", "text": f"7 degrees, says the {ANSWER}"}]}  # fmt: skip
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(url, model, turns)
    equal([block.text for block in second.content if block.type == "text"], [DONE])


@feature("adaptive thinking with effort")
def _(url, model):
    options = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}
    equal([block.text for block in ask(url, model, [user(ANSWER)], **options).content if block.type == "text"], [DONE])


@feature("count_tokens, agent: eight tools, cancelled and tried again")
def _(url, model):
    """Tokens are counted before each request; the count equals the usage of the answer."""
    tools = [{"name": name, "description": name, "input_schema": schema} for name, schema in AGENT_SCHEMAS.items()]
    client = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
    turns = []

    def step(text, cancelled):
        call = next((block for block in turns[-1]["content"] if block.type == "tool_use"), None) if turns else None
        result = {"type": "tool_result", "tool_use_id": call.id, "content": text} if call else None
        turns.append({"role": "user", "content": [result]} if result else user(text))
        count = client.messages.count_tokens(model=model, messages=turns, system=SYSTEM, tools=tools)
        if cancelled:
            request = {"messages": turns, "system": SYSTEM, "tools": tools, "max_tokens": 2000}
            with client.messages.stream(model=model, **request) as stream:
                next(iter(stream))
        message = ask(url, model, turns, tools=tools)
        equal(count.input_tokens, message.usage.input_tokens)
        turns.append({"role": "assistant", "content": message.content})
        blocks = [block for block in message.content if block.type != "thinking"]
        (block,) = blocks
        return (block.name, block.input) if block.type == "tool_use" else block.text

    work(step)


main()
