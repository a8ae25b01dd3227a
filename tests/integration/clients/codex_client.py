"""Codex's requests to /v1/responses: a stream, `store: false`, its tools, and the items of earlier turns."""

import json

import openai
from conversations import AGENT_SCHEMAS, ANSWER, CALL, DONE, KEY, SCHEMA, equal, feature, main, work

TOOLS = [
    {"type": "function", "name": "weather", "description": "The weather now.", "strict": False, "parameters": SCHEMA},
    {"type": "function", "name": "update_plan", "description": "Update the plan.", "strict": False, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["plan"], "properties": {
            "explanation": {"type": "string"}, "plan": {"type": "array", "items": {
                "type": "object", "additionalProperties": False, "required": ["step", "status"], "properties": {
                    "step": {"type": "string"}, "status": {"type": "string"}}}}}}},
]  # fmt: skip


def ask(url, model, items, **options):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    events = client.responses.create(
        model=model, instructions="You are a coding agent.", input=items, stream=True, store=False,
        **{
            "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "1",
            "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "low"}, **options,
        },
    )  # fmt: skip
    *_, last = events
    equal(last.type, "response.completed")
    return last.response


def message(role, text):
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


START = [message("developer", "<permissions>read</permissions>"), message("user", "<cwd>/tmp</cwd>")]


@feature("stream with tools, two turns")
def _(url, model):
    items = [*START, message("user", CALL)]
    (call,) = ask(url, model, items).output
    equal((call.name, call.arguments), ("weather", '{"city": "Oslo"}'))
    output = [{"type": "input_text", "text": f"7 degrees, says the {ANSWER}"}]
    items += [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id},
        {"type": "function_call_output", "call_id": call.call_id, "output": output},
    ]
    equal(ask(url, model, items).output_text, DONE)


@feature("agent: eight tools, cancelled and tried again")
def _(url, model):
    tools = [{"type": "function", "name": n, "strict": False, "parameters": s} for n, s in AGENT_SCHEMAS.items()]
    items = [*START]

    def step(text, cancelled):
        last = items[-1]
        if last["type"] == "function_call":
            items.append({"type": "function_call_output", "call_id": last["call_id"], "output": text})
        else:
            items.append(message("user", text))
        if cancelled:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
            with client.responses.create(model=model, input=items, tools=tools, stream=True, store=False) as stream:
                next(iter(stream))
        response = ask(url, model, items, tools=tools)
        if response.output_text:
            return response.output_text
        (call,) = response.output
        items.append(call.model_dump(include={"type", "name", "arguments", "call_id"}))
        return call.name, json.loads(call.arguments)

    work(step)


@feature("custom tool calls of earlier turns")
def _(url, model):
    items = [
        *START,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
        message("user", ANSWER),
    ]
    equal(ask(url, model, items).output_text, DONE)


@feature("effort: minimal, xhigh")
def _(url, model):
    for effort in ("minimal", "xhigh"):
        equal(ask(url, model, [message("user", ANSWER)], reasoning={"effort": effort}).output_text, DONE)


@feature("tools: web_search, local_shell, apply_patch with a grammar")
def _(url, model):
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    for tool in (
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": grammar},
    ):
        ask(url, model, [message("user", ANSWER)], tools=[*TOOLS, tool])


main()
