"""OpenAI's Agents SDK: agents by Chat Completions and by Responses, with tools and an output type."""

import asyncio

import agents
import conversations as c
import openai
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from conversations import ANSWER, CALL, DONE, JSON, WEATHER, Weather, equal

agents.set_tracing_disabled(True)


def agent(cue=None, kind=OpenAIChatCompletionsModel, **options):
    """Return an agent; with a cue, the agent has a tool whose result contains the cue."""

    @agents.function_tool
    def weather(city: str) -> str:
        return f"{city}: 7 degrees, says the {cue}."

    client = openai.AsyncOpenAI(base_url=c.API, api_key=c.KEY, max_retries=0)
    return agents.Agent(
        name="Agent", instructions="Be brief.", model=kind(model=c.MODEL, openai_client=client),
        model_settings=agents.ModelSettings(temperature=0, max_tokens=200), tools=[weather] if cue else [], **options,
    )  # fmt: skip


def answer(cue, wanted, *arguments, **options):
    equal(Runner.run_sync(agent(*arguments, **options), cue).final_output, wanted)


async def stream():
    result = Runner.run_streamed(agent(), ANSWER)
    async for _ in result.stream_events():
        pass
    equal(result.final_output, DONE)


c.main({
    "chat": lambda: answer(ANSWER, DONE),
    "stream": lambda: asyncio.run(stream()),
    "tools": lambda: answer(CALL, DONE, ANSWER),
    "structured output": lambda: answer(JSON, WEATHER, output_type=Weather),
    "tools with structured output": lambda: answer(CALL, WEATHER, JSON, output_type=Weather),
    "Responses: tools with structured output": lambda: answer(
        CALL, WEATHER, JSON, OpenAIResponsesModel, output_type=Weather),
})  # fmt: skip
