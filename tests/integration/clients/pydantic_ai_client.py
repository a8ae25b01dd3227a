"""pydantic-ai: agents by Chat Completions and Responses, with tools and pydantic models as output."""

from conversations import ANSWER, CALL, DONE, JSON, KEY, Weather, equal, feature, main
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

OSLO = Weather(city="Oslo", degrees=7)


def agent(url, model, kind=OpenAIChatModel, **options):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    return Agent(kind(model, provider=provider), model_settings={"temperature": 0, "max_tokens": 200}, **options)


def weather_agent(url, model, cue, **options):
    """Return an agent with a tool whose result contains the next cue."""
    built = agent(url, model, **options)

    @built.tool_plain
    def weather(city: str) -> str:
        return f"{city}: 7 degrees, says the {cue}."

    return built


@feature("chat")
def _(url, model):
    equal(agent(url, model).run_sync(ANSWER).output, DONE)


@feature("stream")
def _(url, model):
    result = agent(url, model).run_stream_sync(ANSWER)
    equal("".join(result.stream_text(delta=True)), DONE)


@feature("tools")
def _(url, model):
    equal(weather_agent(url, model, ANSWER).run_sync(CALL).output, DONE)


@feature("structured output")
def _(url, model):
    equal(agent(url, model, output_type=NativeOutput(Weather)).run_sync(JSON).output, OSLO)


@feature("tools with structured output")
def _(url, model):
    equal(weather_agent(url, model, JSON, output_type=NativeOutput(Weather)).run_sync(CALL).output, OSLO)


@feature("Responses: tools with structured output")
def _(url, model):
    options = {"kind": OpenAIResponsesModel, "output_type": NativeOutput(Weather)}
    equal(weather_agent(url, model, JSON, **options).run_sync(CALL).output, OSLO)


main()
