"""OpenAI's Agents SDK: agents by Chat Completions and by Responses, with tools and an output type."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)  # fmt: skip
from conversations import ANSWER, CALL, DONE, JSON, KEY, Weather, equal, feature, main

OSLO = Weather(city="Oslo", degrees=7)
set_tracing_disabled(True)


def agent(url, model, cue=None, kind=OpenAIChatCompletionsModel, **options):
    """Return an agent; with a cue, the agent has a tool whose result contains the cue."""

    @function_tool
    def weather(city: str) -> str:
        return f"{city}: 7 degrees, says the {cue}."

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return Agent(
        name="Agent", instructions="Be brief.", model=kind(model=model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=200), tools=[weather] if cue else [], **options,
    )  # fmt: skip


@feature("chat")
def _(url, model):
    equal(Runner.run_sync(agent(url, model), ANSWER).final_output, DONE)


@feature("stream")
def _(url, model):
    async def read():
        result = Runner.run_streamed(agent(url, model), ANSWER)
        async for _ in result.stream_events():
            pass
        return result.final_output

    equal(asyncio.run(read()), DONE)


@feature("tools")
def _(url, model):
    equal(Runner.run_sync(agent(url, model, ANSWER), CALL).final_output, DONE)


@feature("structured output")
def _(url, model):
    equal(Runner.run_sync(agent(url, model, output_type=Weather), JSON).final_output, OSLO)


@feature("tools with structured output")
def _(url, model):
    equal(Runner.run_sync(agent(url, model, JSON, output_type=Weather), CALL).final_output, OSLO)


@feature("Responses: tools with structured output")
def _(url, model):
    built = agent(url, model, JSON, kind=OpenAIResponsesModel, output_type=Weather)
    equal(Runner.run_sync(built, CALL).final_output, OSLO)


main()
