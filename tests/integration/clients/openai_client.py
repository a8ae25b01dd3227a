"""The openai package: chat, tools, structured outputs, Responses, sampling; and an agent's loop."""

import json
import time
import urllib.request

import openai
from conversations import (
    AGENT_SCHEMAS,
    ANSWER,
    CALL,
    DONE,
    FINAL_JSON,
    JSON,
    KEY,
    NAMED,
    THOUGHT,
    TOKENS,
    TOOL,
    TOY,
    TWO_CALLS,
    Weather,
    equal,
    feature,
    main,
    raises,
    work,
)  # fmt: skip

RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
OSLO_CALL = [("weather", '{"city": "Oslo"}')]
END = "200002"  # <|return|>
DEADLINE_SECONDS = 400.0
WINDOW = 128  # tokens that gpt-oss's sliding window holds


def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def chat(url, model, cue, **options):
    defaults = {"messages": [{"role": "user", "content": cue}], "max_tokens": TOKENS, "temperature": 0}
    return client(url).chat.completions.create(model=model, **{**defaults, **options})


def calls(response):
    return [(call.function.name, call.function.arguments) for call in response.choices[0].message.tool_calls or ()]


@feature("chat")
def _(url, model):
    response = chat(url, model, ANSWER)
    message = response.choices[0].message
    equal((message.content, message.reasoning, response.choices[0].finish_reason), (DONE, THOUGHT, "stop"))
    equal(response.usage.total_tokens, response.usage.prompt_tokens + response.usage.completion_tokens)


@feature("stream")
def _(url, model):
    events = list(chat(url, model, ANSWER, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for event in events for choice in event.choices]
    equal("".join(delta.content or "" for delta in deltas), DONE)
    equal("".join(getattr(delta, "reasoning", None) or "" for delta in deltas), THOUGHT)
    equal([choice.finish_reason for event in events for choice in event.choices][-1], "stop")
    equal(events[-1].usage.completion_tokens, chat(url, model, ANSWER).usage.completion_tokens)


@feature("tools: auto")
def _(url, model):
    response = chat(url, model, CALL, tools=[TOOL])
    equal((calls(response), response.choices[0].finish_reason), (OSLO_CALL, "tool_calls"))


@feature("tools: required")
def _(url, model):
    response = chat(url, model, CALL, tools=[TOOL], tool_choice="required")
    equal((calls(response), response.choices[0].finish_reason), (OSLO_CALL, "tool_calls"))


@feature("tools: named")
def _(url, model):
    equal(calls(chat(url, model, CALL, tools=[TOOL], tool_choice=NAMED)), OSLO_CALL)


@feature("tools: none")
def _(url, model):
    message = chat(url, model, ANSWER, tools=[TOOL], tool_choice="none").choices[0].message
    equal((message.content, message.tool_calls or []), (DONE, []))


@feature("tools: streamed")
def _(url, model):
    names, arguments = "", ""
    for event in chat(url, model, CALL, tools=[TOOL], stream=True):
        for call in (call for choice in event.choices for call in choice.delta.tool_calls or ()):
            names += call.function.name or ""
            arguments += call.function.arguments or ""
    equal([(names, arguments)], OSLO_CALL)


@feature("tools: parallel calls")
def _(url, model):
    equal(calls(chat(url, model, TWO_CALLS, tools=[TOOL])), [*OSLO_CALL, ("weather", '{"city": "Rome"}')])


def parsed(url, model, cue):
    messages = [{"role": "user", "content": cue}]
    response = client(url).chat.completions.parse(
        model=model, messages=messages, max_tokens=TOKENS, temperature=0, response_format=Weather
    )
    equal(response.choices[0].message.parsed, Weather(city="Oslo", degrees=7))


@feature("structured outputs")
def _(url, model):
    parsed(url, model, JSON)


@feature("structured outputs: `final json`")
def _(url, model):
    parsed(url, model, FINAL_JSON)


@feature("structured outputs: json_object")
def _(url, model):
    message = chat(url, model, JSON, response_format={"type": "json_object"}).choices[0].message
    equal(json.loads(message.content), {"city": "Oslo", "degrees": 7})


@feature("Responses")
def _(url, model):
    response = client(url).responses.create(model=model, input=ANSWER, max_output_tokens=TOKENS)
    equal((response.output_text, [item.type for item in response.output]), (DONE, ["reasoning", "message"]))


@feature("Responses: streamed")
def _(url, model):
    events = list(client(url).responses.create(model=model, input=ANSWER, max_output_tokens=TOKENS, stream=True))
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), DONE)
    equal((events[0].type, events[-1].type), ("response.created", "response.completed"))
    equal(events[-1].response.output_text, DONE)


@feature("Responses: tools, two turns")
def _(url, model):
    options = {"model": model, "max_output_tokens": TOKENS, "tools": [RESPONSES_TOOL]}
    turns = [{"role": "user", "content": CALL}]
    first = client(url).responses.create(input=turns, **options)
    (call,) = (item for item in first.output if item.type == "function_call")
    equal([(call.name, call.arguments)], OSLO_CALL)
    turns += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": f"It is 7 degrees there, says the {ANSWER}.",
        },
    ]
    equal(client(url).responses.create(input=turns, **options).output_text, DONE)


@feature("Responses: tools, streamed")
def _(url, model):
    options = {"max_output_tokens": TOKENS, "tools": [RESPONSES_TOOL], "stream": True}
    events = list(client(url).responses.create(model=model, input=CALL, **options))
    equal(
        "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta"),
        '{"city": "Oslo"}',
    )
    equal([item.type for item in events[-1].response.output], ["function_call"])


@feature("Responses: tools: none")
def _(url, model):
    options = {"max_output_tokens": TOKENS, "tools": [RESPONSES_TOOL], "tool_choice": "none"}
    response = client(url).responses.create(model=model, input=CALL, **options)
    equal(([item.type for item in response.output], response.output_text), (["message"], '{"city": "Oslo"}'))


@feature("Responses: previous_response_id")
def _(url, model):
    options = {"model": model, "max_output_tokens": TOKENS, "tools": [RESPONSES_TOOL]}
    first = client(url).responses.create(input=CALL, **options)
    output = [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": f"7 degrees, {ANSWER}"}]
    second = client(url).responses.create(input=output, previous_response_id=first.id, **options)
    equal((second.output_text, second.previous_response_id), (DONE, first.id))
    equal(second.usage.input_tokens > first.usage.input_tokens, True)


@feature("Responses: log probabilities")
def _(url, model):
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": TOKENS}
    response = client(url).responses.create(model=model, input=ANSWER, **options)
    (message,) = (item for item in response.output if item.type == "message")
    equal("".join(entry.token for entry in message.content[0].logprobs), DONE)
    equal({len(entry.top_logprobs) for entry in message.content[0].logprobs}, {2})


@feature("tools with structured output")
def _(url, model):
    schema = {"type": "json_schema", "json_schema": {"name": "Weather", "schema": Weather.model_json_schema()}}
    equal(calls(chat(url, model, CALL, tools=[TOOL], response_format=schema)), OSLO_CALL)
    message = chat(url, model, JSON, tools=[TOOL], response_format=schema).choices[0].message
    equal(Weather.model_validate_json(message.content), Weather(city="Oslo", degrees=7))


@feature("reasoning_effort: none to max")
def _(url, model):
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        equal(chat(url, model, ANSWER, reasoning_effort=effort).choices[0].message.content, DONE)


@feature("continue_final_message")
def _(url, model):
    messages = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": "All"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    equal(chat(url, model, ANSWER, messages=messages, extra_body=more).choices[0].message.content, " done.")


@feature("removed fields")
def _(url, model):
    for field in ("guided_json", "guided_choice", "guided_regex", "guided_grammar", "functions"):
        raises(openai.BadRequestError, lambda field=field: chat(url, model, ANSWER, extra_body={field: {"a": 1}}))


@feature("log probabilities")
def _(url, model):
    response = chat(url, model, ANSWER, logprobs=True, top_logprobs=2)
    entries = response.choices[0].logprobs.content
    equal("".join(entry.token for entry in entries), DONE)
    equal({len(entry.top_logprobs) for entry in entries}, {2})
    equal(all(entry.logprob <= 0 for entry in entries), True)


@feature("n")
def _(url, model):
    response = chat(url, model, ANSWER, n=2, temperature=1)  # vLLM refuses several greedy answers
    equal([(choice.index, choice.message.content) for choice in response.choices], [(0, DONE), (1, DONE)])


@feature("stop")
def _(url, model):
    choice = chat(url, model, TOY, stop=["toy"]).choices[0]
    equal((choice.message.content, choice.finish_reason), ("I have a ", "stop"))


@feature("stop in the arguments of a call")
def _(url, model):
    equal(calls(chat(url, model, CALL, tools=[TOOL], stop=["Oslo"])), [("weather", '{"city": "')])


def metric(url, name):
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


@feature("cancel")
def _(url, model):
    """Closing the stream ends the answer: far fewer tokens are generated than requested."""

    def unfinished():
        """Return the tokens of unfinished or aborted answers; other clients are active too."""
        return metric(url, "vllm:generation_tokens_total") - metric(url, "vllm:request_generation_tokens_sum")

    before = unfinished()
    options = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = client(url).completions.create(model=model, prompt="x", **options)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while metric(url, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    equal(metric(url, "vllm:num_requests_running"), 0.0)
    equal(unfinished() - before < 1500, True)


@feature("seed")
def _(url, model):
    def write(seed):
        options = {"max_tokens": 8, "temperature": 1, "seed": seed, "logit_bias": {END: -100}}
        return client(url).completions.create(model=model, prompt="x", **options).choices[0].text

    first = write(1)
    equal(write(1), first)
    equal(write(2) == first, False)


@feature("agent: eight tools, cancelled and tried again")
def _(url, model):
    """Prompts are longer than the sliding window and begin with the prefix cached in the previous turn."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in AGENT_SCHEMAS.items()]
    messages, prompts = [], []
    hits = metric(url, "vllm:prefix_cache_hits_total")

    def step(text, cancelled):
        if messages:
            last = messages[-1]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": last, "content": text})
        else:
            messages.append({"role": "user", "content": text})
        if cancelled:
            with chat(url, model, "", messages=messages, tools=tools, stream=True) as stream:
                next(iter(stream))
        response = chat(url, model, "", messages=messages, tools=tools)
        prompts.append(response.usage.prompt_tokens)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return message.content
        ((name, arguments),) = calls(response)
        return name, json.loads(arguments)

    work(step)
    equal(prompts[-1] > 2 * WINDOW, True)
    equal(metric(url, "vllm:prefix_cache_hits_total") - hits > sum(prompts[:-1]) / 2, True)


main()
