"""LangChain's ChatOpenAI: chat, stream, tools, and `with_structured_output` in its three methods."""

import conversations as c
from conversations import ANSWER, CALL, DONE, JSON, WEATHER, Weather, equal
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=c.MODEL, base_url=c.API, api_key=c.KEY, max_retries=0, temperature=0, max_tokens=c.TOKENS)


def tools():
    (call,) = chat.bind_tools([c.TOOL]).invoke(CALL).tool_calls
    equal((call["name"], call["args"]), c.OSLO_CALL)


def structured(method, cue):
    equal(chat.with_structured_output(Weather, method=method).invoke(cue), WEATHER)


c.main({
    "chat": lambda: equal(chat.invoke(ANSWER).content, DONE),
    "stream": lambda: equal("".join(piece.content for piece in chat.stream(ANSWER)), DONE),
    "tools": tools,
    "with_structured_output: json_schema": lambda: structured("json_schema", JSON),
    "with_structured_output: json_schema, `final json`": lambda: structured("json_schema", c.FINAL_JSON),
    "with_structured_output: function_calling": lambda: structured("function_calling", c.NAMED_CALL),
    "with_structured_output: json_mode": lambda: structured("json_mode", f"JSON: {JSON}"),
})  # fmt: skip
