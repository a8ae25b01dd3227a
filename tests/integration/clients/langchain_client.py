"""LangChain's ChatOpenAI: chat, stream, tools, and `with_structured_output` in its three methods."""

from conversations import (
    ANSWER,
    CALL,
    DONE,
    FINAL_JSON,
    JSON,
    KEY,
    NAMED_CALL,
    TOKENS,
    TOOL,
    Weather,
    equal,
    feature,
    main,
)
from langchain_openai import ChatOpenAI

OSLO = Weather(city="Oslo", degrees=7)


def chat(url, model):
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=TOKENS)


@feature("chat")
def _(url, model):
    equal(chat(url, model).invoke(ANSWER).content, DONE)


@feature("stream")
def _(url, model):
    equal("".join(piece.content for piece in chat(url, model).stream(ANSWER)), DONE)


@feature("tools")
def _(url, model):
    (call,) = chat(url, model).bind_tools([TOOL]).invoke(CALL).tool_calls
    equal((call["name"], call["args"]), ("weather", {"city": "Oslo"}))


@feature("with_structured_output: json_schema")
def _(url, model):
    equal(chat(url, model).with_structured_output(Weather, method="json_schema").invoke(JSON), OSLO)


@feature("with_structured_output: json_schema, `final json`")
def _(url, model):
    equal(chat(url, model).with_structured_output(Weather, method="json_schema").invoke(FINAL_JSON), OSLO)


@feature("with_structured_output: function_calling")
def _(url, model):
    equal(chat(url, model).with_structured_output(Weather, method="function_calling").invoke(NAMED_CALL), OSLO)


@feature("with_structured_output: json_mode")
def _(url, model):
    equal(chat(url, model).with_structured_output(Weather, method="json_mode").invoke(f"JSON: {JSON}"), OSLO)


main()
