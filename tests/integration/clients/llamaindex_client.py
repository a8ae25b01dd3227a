"""LlamaIndex's OpenAILike: chat, stream, tools, structured output by a call, and by response_format beside tools."""

from conversations import ANSWER, CALL, DONE, JSON, KEY, NAMED_CALL, TOKENS, Weather, equal, feature, main
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

OSLO = Weather(city="Oslo", degrees=7)
FORMAT = {"type": "json_schema", "json_schema": {"name": "Weather", "schema": Weather.model_json_schema()}}


def llm(url, model):
    return OpenAILike(
        model=model, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        temperature=0, max_tokens=TOKENS, max_retries=0, context_window=4096,
    )  # fmt: skip


def weather(city: str) -> str:
    return city


TOOL = FunctionTool.from_defaults(weather)


def calls(model, response):
    return [(call.tool_name, call.tool_kwargs) for call in model.get_tool_calls_from_response(response, False)]


@feature("chat")
def _(url, model):
    equal(llm(url, model).chat([ChatMessage(ANSWER)]).message.content, DONE)


@feature("stream")
def _(url, model):
    equal("".join(piece.delta or "" for piece in llm(url, model).stream_chat([ChatMessage(ANSWER)])), DONE)


@feature("tools")
def _(url, model):
    client = llm(url, model)
    equal(calls(client, client.chat_with_tools([TOOL], user_msg=CALL)), [("weather", {"city": "Oslo"})])


@feature("structured output")
def _(url, model):
    equal(llm(url, model).structured_predict(Weather, PromptTemplate(NAMED_CALL)), OSLO)


@feature("tools with structured output")
def _(url, model):
    client = llm(url, model)
    response = client.chat_with_tools([TOOL], user_msg=CALL, response_format=FORMAT)
    equal(calls(client, response), [("weather", {"city": "Oslo"})])
    response = client.chat_with_tools([TOOL], user_msg=JSON, response_format=FORMAT)
    equal(Weather.model_validate_json(response.message.content), OSLO)


main()
