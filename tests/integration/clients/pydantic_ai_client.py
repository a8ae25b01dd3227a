"""pydantic-ai: agents by Chat Completions and Responses, with tools and pydantic models as output."""

import conversations as c
from conversations import ANSWER, CALL, DONE, JSON, WEATHER, Weather, equal
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=c.API, api_key=c.KEY)


def agent(cue=None, kind=OpenAIChatModel, **options):
    """Return an agent; with a cue, the agent has a tool whose result contains the cue."""

    def weather(city: str) -> str:
        return f"{city}: 7 degrees, says the {cue}."

    settings = {"temperature": 0, "max_tokens": 200}
    tools = [weather] if cue else []
    return Agent(kind(c.MODEL, provider=PROVIDER), model_settings=settings, tools=tools, **options)


def answer(cue, wanted, *arguments, **options):
    equal(agent(*arguments, **options).run_sync(cue).output, wanted)


NATIVE = {"output_type": NativeOutput(Weather)}
c.main({
    "chat": lambda: answer(ANSWER, DONE),
    "stream": lambda: equal("".join(agent().run_stream_sync(ANSWER).stream_text(delta=True)), DONE),
    "tools": lambda: answer(CALL, DONE, ANSWER),
    "structured output": lambda: answer(JSON, WEATHER, **NATIVE),
    "tools with structured output": lambda: answer(CALL, WEATHER, JSON, **NATIVE),
    "Responses: tools with structured output": lambda: answer(CALL, WEATHER, JSON, OpenAIResponsesModel, **NATIVE),
})  # fmt: skip
