"""The openai package: chat, tools, structured outputs, Responses, sampling; and an agent's loop."""

import json
import time
import urllib.request

import conversations as c
import openai
from conversations import ANSWER, CALL, DONE, JSON, THOUGHT, TOKENS, TOOL, WEATHER, Weather, equal, feature, raises

RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
OSLO, OSLO_CALL = '{"city": "Oslo"}', [("weather", '{"city": "Oslo"}')]
END = "200002"  # <|return|>
DEADLINE_SECONDS = 400.0
WINDOW = 128  # tokens that gpt-oss's sliding window holds
client = openai.OpenAI(base_url=c.API, api_key=c.KEY, max_retries=0)


def chat(cue, **options):
    defaults = {"messages": [{"role": "user", "content": cue}], "max_tokens": TOKENS, "temperature": 0}
    return client.chat.completions.create(model=c.MODEL, **{**defaults, **options})


def content(cue, **options):
    return chat(cue, **options).choices[0].message.content


def calls(response):
    return [(call.function.name, call.function.arguments) for call in response.choices[0].message.tool_calls or ()]


def respond(input, **options):  # noqa: A002 - the API's name
    return client.responses.create(model=c.MODEL, input=input, max_output_tokens=TOKENS, **options)


def types(response):
    return [item.type for item in response.output]


def joined(events, kind):
    return "".join(event.delta for event in events if event.type == kind)


@feature("chat")
def _():
    response = chat(ANSWER)
    message = response.choices[0].message
    equal((message.content, message.reasoning, response.choices[0].finish_reason), (DONE, THOUGHT, "stop"))
    equal(response.usage.total_tokens, response.usage.prompt_tokens + response.usage.completion_tokens)


@feature("stream")
def _():
    events = list(chat(ANSWER, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for event in events for choice in event.choices]
    equal("".join(delta.content or "" for delta in deltas), DONE)
    equal("".join(getattr(delta, "reasoning", None) or "" for delta in deltas), THOUGHT)
    equal([choice.finish_reason for event in events for choice in event.choices][-1], "stop")
    equal(events[-1].usage.completion_tokens, chat(ANSWER).usage.completion_tokens)


def called(**options):
    response = chat(CALL, tools=[TOOL], **options)
    equal((calls(response), response.choices[0].finish_reason), (OSLO_CALL, "tool_calls"))


@feature("tools: none")
def _():
    message = chat(ANSWER, tools=[TOOL], tool_choice="none").choices[0].message
    equal((message.content, message.tool_calls or []), (DONE, []))


@feature("tools: streamed")
def _():
    names, arguments = "", ""
    for event in chat(CALL, tools=[TOOL], stream=True):
        for call in (call for choice in event.choices for call in choice.delta.tool_calls or ()):
            names += call.function.name or ""
            arguments += call.function.arguments or ""
    equal([(names, arguments)], OSLO_CALL)


def parsed(cue):
    messages = [{"role": "user", "content": cue}]
    response = client.chat.completions.parse(
        model=c.MODEL, messages=messages, max_tokens=TOKENS, temperature=0, response_format=Weather
    )
    equal(response.choices[0].message.parsed, WEATHER)


@feature("Responses")
def _():
    response = respond(ANSWER)
    equal((response.output_text, types(response)), (DONE, ["reasoning", "message"]))


@feature("Responses: streamed")
def _():
    events = list(respond(ANSWER, stream=True))
    equal(joined(events, "response.output_text.delta"), DONE)
    equal((events[0].type, events[-1].type), ("response.created", "response.completed"))
    equal(events[-1].response.output_text, DONE)


@feature("Responses: tools, two turns")
def _():
    turns = [{"role": "user", "content": CALL}]
    (call,) = (item for item in respond(turns, tools=[RESPONSES_TOOL]).output if item.type == "function_call")
    equal([(call.name, call.arguments)], OSLO_CALL)
    output = f"It is 7 degrees there, says the {ANSWER}."
    turns += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": output},
    ]
    equal(respond(turns, tools=[RESPONSES_TOOL]).output_text, DONE)


@feature("Responses: tools, streamed")
def _():
    events = list(respond(CALL, tools=[RESPONSES_TOOL], stream=True))
    equal(joined(events, "response.function_call_arguments.delta"), OSLO)
    equal(types(events[-1].response), ["function_call"])


@feature("Responses: tools: none")
def _():
    response = respond(CALL, tools=[RESPONSES_TOOL], tool_choice="none")
    equal((types(response), response.output_text), (["message"], OSLO))


@feature("Responses: previous_response_id")
def _():
    first = respond(CALL, tools=[RESPONSES_TOOL])
    output = [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": f"7 degrees, {ANSWER}"}]
    second = respond(output, previous_response_id=first.id, tools=[RESPONSES_TOOL])
    equal((second.output_text, second.previous_response_id), (DONE, first.id))
    equal(second.usage.input_tokens > first.usage.input_tokens, True)


@feature("Responses: log probabilities")
def _():
    response = respond(ANSWER, include=["message.output_text.logprobs"], top_logprobs=2)
    (message,) = (item for item in response.output if item.type == "message")
    equal("".join(entry.token for entry in message.content[0].logprobs), DONE)
    equal({len(entry.top_logprobs) for entry in message.content[0].logprobs}, {2})


@feature("tools with structured output")
def _():
    schema = {"type": "json_schema", "json_schema": {"name": "Weather", "schema": Weather.model_json_schema()}}
    equal(calls(chat(CALL, tools=[TOOL], response_format=schema)), OSLO_CALL)
    equal(Weather.model_validate_json(content(JSON, tools=[TOOL], response_format=schema)), WEATHER)


@feature("reasoning_effort: none to max")
def _():
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        equal(content(ANSWER, reasoning_effort=effort), DONE)


@feature("continue_final_message")
def _():
    messages = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": "All"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    equal(content("", messages=messages, extra_body=more), " done.")


@feature("removed fields")
def _():
    for field in ("guided_json", "guided_choice", "guided_regex", "guided_grammar", "functions"):
        raises(openai.BadRequestError, lambda field=field: chat(ANSWER, extra_body={field: {"a": 1}}))


@feature("log probabilities")
def _():
    entries = chat(ANSWER, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    equal("".join(entry.token for entry in entries), DONE)
    equal({len(entry.top_logprobs) for entry in entries}, {2})
    equal(all(entry.logprob <= 0 for entry in entries), True)


@feature("n")
def _():
    response = chat(ANSWER, n=2, temperature=1)  # vLLM refuses several greedy answers
    equal([(choice.index, choice.message.content) for choice in response.choices], [(0, DONE), (1, DONE)])


@feature("stop")
def _():
    choice = chat(c.TOY, stop=["toy"]).choices[0]
    equal((choice.message.content, choice.finish_reason), ("I have a ", "stop"))


def metric(name):
    request = urllib.request.Request(f"{c.URL}/metrics", headers={"Authorization": f"Bearer {c.KEY}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


@feature("cancel")
def _():
    """Closing the stream ends the answer: far fewer tokens are generated than requested."""

    def unfinished():
        """Return the tokens of unfinished or aborted answers; other clients are active too."""
        return metric("vllm:generation_tokens_total") - metric("vllm:request_generation_tokens_sum")

    before = unfinished()
    options = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = client.completions.create(model=c.MODEL, prompt="x", **options)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    equal(metric("vllm:num_requests_running"), 0.0)
    equal(unfinished() - before < 1500, True)


@feature("seed")
def _():
    def write(seed):
        options = {"max_tokens": 8, "temperature": 1, "seed": seed, "logit_bias": {END: -100}}
        return client.completions.create(model=c.MODEL, prompt="x", **options).choices[0].text

    first = write(1)
    equal(write(1), first)
    equal(write(2) == first, False)


@feature("agent: eight tools, cancelled and tried again")
def _():
    """Prompts are longer than the sliding window and begin with the prefix cached in the previous turn."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in c.AGENT_SCHEMAS.items()]
    messages, prompts = [], []
    hits = metric("vllm:prefix_cache_hits_total")

    def step(text, cancelled):
        if messages:
            last = messages[-1]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": last, "content": text})
        else:
            messages.append({"role": "user", "content": text})
        if cancelled:
            with chat("", messages=messages, tools=tools, stream=True) as stream:
                next(iter(stream))
        response = chat("", messages=messages, tools=tools)
        prompts.append(response.usage.prompt_tokens)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return message.content
        ((name, arguments),) = calls(response)
        return name, json.loads(arguments)

    c.work(step)
    equal(prompts[-1] > 2 * WINDOW, True)
    equal(metric("vllm:prefix_cache_hits_total") - hits > sum(prompts[:-1]) / 2, True)


c.main({
    "tools: auto": called,
    "tools: required": lambda: called(tool_choice="required"),
    "tools: named": lambda: equal(calls(chat(CALL, tools=[TOOL], tool_choice=c.NAMED)), OSLO_CALL),
    "tools: parallel calls": lambda: equal(
        calls(chat(c.TWO_CALLS, tools=[TOOL])), [*OSLO_CALL, ("weather", '{"city": "Rome"}')]),
    "structured outputs": lambda: parsed(JSON),
    "structured outputs: `final json`": lambda: parsed(c.FINAL_JSON),
    "structured outputs: json_object": lambda: equal(
        json.loads(content(JSON, response_format={"type": "json_object"})), WEATHER.model_dump()),
    "stop in the arguments of a call": lambda: equal(
        calls(chat(CALL, tools=[TOOL], stop=["Oslo"])), [("weather", '{"city": "')]),
})  # fmt: skip
