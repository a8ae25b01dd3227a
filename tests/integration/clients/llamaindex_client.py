"""LlamaIndex's OpenAILike: chat, stream, tools, structured output by a call, and by response_format beside tools."""

import conversations as c
from conversations import ANSWER, CALL, DONE, WEATHER, Weather, equal
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

FORMAT = {"type": "json_schema", "json_schema": {"name": "Weather", "schema": Weather.model_json_schema()}}
llm = OpenAILike(
    model=c.MODEL, api_base=c.API, api_key=c.KEY, is_chat_model=True, is_function_calling_model=True, temperature=0,
    max_tokens=c.TOKENS, max_retries=0, context_window=4096,
)  # fmt: skip


def weather(city: str) -> str:
    return city


TOOL = FunctionTool.from_defaults(weather)


def calls(**options):
    response = llm.chat_with_tools([TOOL], user_msg=CALL, **options)
    equal([(call.tool_name, call.tool_kwargs) for call in llm.get_tool_calls_from_response(response)], [c.OSLO_CALL])


def both():
    calls(response_format=FORMAT)
    response = llm.chat_with_tools([TOOL], user_msg=c.JSON, response_format=FORMAT)
    equal(Weather.model_validate_json(response.message.content), WEATHER)


c.main({
    "chat": lambda: equal(llm.chat([ChatMessage(ANSWER)]).message.content, DONE),
    "stream": lambda: equal("".join(piece.delta or "" for piece in llm.stream_chat([ChatMessage(ANSWER)])), DONE),
    "tools": calls,
    "structured output": lambda: equal(llm.structured_predict(Weather, PromptTemplate(c.NAMED_CALL)), WEATHER),
    "tools with structured output": both,
})  # fmt: skip
