"""Codex's requests to /v1/responses: a stream, `store: false`, its tools, and the items of earlier turns."""

import json

import conversations as c
import openai
from conversations import ANSWER, CALL, DONE, equal, feature

STEP = {"type": "object", "additionalProperties": False, "required": ["step", "status"], "properties": {
    "step": {"type": "string"}, "status": {"type": "string"}}}  # fmt: skip
TOOLS = [
    {"type": "function", "name": "weather", "description": "The weather now.", "strict": False, "parameters": c.SCHEMA},
    {"type": "function", "name": "update_plan", "description": "Update the plan.", "strict": False, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["plan"], "properties": {
            "explanation": {"type": "string"}, "plan": {"type": "array", "items": STEP}}}},
]  # fmt: skip
client = openai.OpenAI(base_url=c.API, api_key=c.KEY, max_retries=0)


def ask(items, **options):
    events = client.responses.create(
        model=c.MODEL, instructions="You are a coding agent.", input=items, stream=True, store=False,
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
def _():
    items = [*START, message("user", CALL)]
    (call,) = ask(items).output
    equal((call.name, call.arguments), ("weather", '{"city": "Oslo"}'))
    output = [{"type": "input_text", "text": f"7 degrees, says the {ANSWER}"}]
    items += [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id},
        {"type": "function_call_output", "call_id": call.call_id, "output": output},
    ]
    equal(ask(items).output_text, DONE)


@feature("agent: eight tools, cancelled and tried again")
def _():
    tools = [{"type": "function", "name": n, "strict": False, "parameters": s} for n, s in c.AGENT_SCHEMAS.items()]
    items = [*START]

    def step(text, cancelled):
        last = items[-1]
        if last["type"] == "function_call":
            items.append({"type": "function_call_output", "call_id": last["call_id"], "output": text})
        else:
            items.append(message("user", text))
        if cancelled:
            with client.responses.create(model=c.MODEL, input=items, tools=tools, stream=True, store=False) as stream:
                next(iter(stream))
        response = ask(items, tools=tools)
        if response.output_text:
            return response.output_text
        (call,) = response.output
        items.append(call.model_dump(include={"type", "name", "arguments", "call_id"}))
        return call.name, json.loads(call.arguments)

    c.work(step)


@feature("custom tool calls of earlier turns")
def _():
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin Patch"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."}
    equal(ask([*START, call, output, message("user", ANSWER)]).output_text, DONE)


@feature("effort: minimal, xhigh")
def _():
    for effort in ("minimal", "xhigh"):
        equal(ask([message("user", ANSWER)], reasoning={"effort": effort}).output_text, DONE)


@feature("tools: web_search, local_shell, apply_patch with a grammar")
def _():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    custom = {"type": "custom", "name": "apply_patch", "format": grammar}
    for tool in ({"type": "web_search"}, {"type": "local_shell"}, custom):
        ask([message("user", ANSWER)], tools=[*TOOLS, tool])


c.main()
