# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A request that fails, or is cancelled, ends its response and every stream of it."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm import SamplingParams
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.parser_manager import ParserManager

SECONDS = 5
INVALID = VLLMValidationError("the schema is none")


class Serving(OpenAIServingResponses):
    """What runs and stores requests, whose generation is `generate`."""

    def __init__(self, generate):
        self.generate = generate
        self.use_harmony = self.enable_per_request_metrics = False
        self.has_kv_connector = False
        self.tool_server = None
        self.response_store, self.msg_store, self.event_store = {}, {}, {}
        self.response_store_lock = asyncio.Lock()
        self.background_tasks = {}
        self.enable_store = True
        self.online_renderer = SimpleNamespace(
            validate_chat_template=lambda **kwargs: None,
            trust_request_chat_template=False,
        )
        self.renderer = SimpleNamespace(get_tokenizer=lambda: None)
        self.models = SimpleNamespace(model_name=lambda lora: "model")
        self.model_config = SimpleNamespace(max_model_len=64)
        self.default_sampling_params, self.override_max_tokens = {}, None

    async def _check_model(self, request):
        return None

    def _preflight(self, n=1):
        pass

    def _maybe_get_adapters(self, request):
        return None

    async def _render_resolved_response_inputs(self, request, previous):
        return SimpleNamespace(messages=[], engine_input={})

    def _validate_generator_input(self, engine_input):
        return None

    def _extract_prompt_len(self, engine_input):
        return 1

    def _effective_chat_template_kwargs(self, request):
        return {}

    def _make_response_parser(self, *args):
        return None

    def _get_session_id(self, *args):
        return None

    def _get_priority(self, *args):
        return 0

    def _generate_with_builtin_tools(self, **kwargs):
        return self.generate(kwargs["context"])


async def fails(context):
    raise INVALID
    yield


async def runs(context):
    await asyncio.Event().wait()
    yield


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(
        ResponsesRequest, "to_sampling_params", lambda *args: SamplingParams()
    )

    async def ask(server, **options):
        request = ResponsesRequest(input="hi", model="model", **options)
        return request.request_id, await server.create_responses(request)

    return ask


def run(coroutine):
    """Run it; a reader that waits for ever is a TimeoutError."""
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


async def types(stream):
    return [event.type async for event in stream]


BEGIN = ["response.created", "response.in_progress"]


def test_a_background_response_that_fails_says_so(ask):
    async def main():
        server = Serving(fails)
        response_id, response = await ask(server, background=True)
        assert response.status == "queued"
        await asyncio.wait(server.background_tasks.values())
        response = await server.retrieve_responses(response_id, None, False)
        assert response.status == "failed"
        assert (response.error.code, response.error.message) == (
            "invalid_prompt",
            "the schema is none",
        )

    run(main())


def test_a_background_stream_that_fails_ends(ask):
    async def main():
        server = Serving(fails)
        response_id, stream = await ask(server, background=True, stream=True)
        assert await types(stream) == [*BEGIN, "response.failed"]
        response = await server.retrieve_responses(response_id, None, False)
        assert (response.status, response.error.code) == ("failed", "invalid_prompt")
        again = await server.retrieve_responses(response_id, 1, True)
        assert await types(again) == ["response.failed"]
        behind = await server.retrieve_responses(response_id, 99, True)
        assert await types(behind) == []

    run(main())


def test_a_background_stream_that_fails_before_its_first_event_ends(ask):
    async def breaks(*args, **kwargs):
        raise GenerationError("broken")
        yield

    async def main():
        server = Serving(runs)
        server.responses_stream_generator = breaks
        response_id, stream = await ask(server, background=True, stream=True)
        assert await types(stream) == []
        response = await server.retrieve_responses(response_id, None, False)
        assert (response.status, response.error.code) == ("failed", "server_error")

    run(main())


def test_readers_of_a_cancelled_stream_end(ask):
    async def main():
        server = Serving(runs)
        response_id, stream = await ask(server, background=True, stream=True)
        await asyncio.sleep(0)
        more = await server.retrieve_responses(response_id, None, True)
        readers = [asyncio.create_task(types(one)) for one in (stream, more)]
        while len(server.event_store[response_id][0]) < len(BEGIN):
            await asyncio.sleep(0)
        response = await server.cancel_responses(response_id)
        assert response.status == "cancelled"
        assert await asyncio.gather(*readers) == [BEGIN, BEGIN]

    run(main())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (INVALID, "invalid_prompt"),
        (GenerationError("broken"), "server_error"),
        (TypeError("a fault of the server's code"), "server_error"),
    ],
)
def test_a_stream_that_fails_has_the_error(ask, monkeypatch, error, code):
    logged = []
    monkeypatch.setattr(
        serving.logger, "error", lambda *args, exc_info=None: logged.append(exc_info)
    )

    async def generate(context):
        raise error
        yield

    async def main():
        _, stream = await ask(Serving(generate), stream=True, store=False)
        events = [event async for event in stream]
        assert [event.type for event in events] == [*BEGIN, "response.failed"]
        assert [event.sequence_number for event in events] == [0, 1, 2]
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", code)
        assert failed.error.message == str(error)
        assert logged == ([True] if code == "server_error" else [])  # a traceback

    run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_error_before_the_first_message_fails(ask, streamed):
    parser_cls = ParserManager.get_parser(
        tool_parser_name="openai",
        reasoning_parser_name="openai_gptoss",
        enable_auto_tools=True,
        is_harmony=True,
    )

    async def breaks(context):
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason="error",
        )
        context.append_output(
            RequestOutput(
                request_id="resp_1",
                prompt="hi",
                prompt_token_ids=[1],
                prompt_logprobs=None,
                outputs=[completion],
                finished=True,
            )
        )
        yield context

    async def main():
        server = Serving(breaks)
        server.use_harmony = True
        server._make_response_parser = lambda *args: parser_cls(
            SimpleNamespace(get_vocab=lambda: {})
        )
        server._extract_prompt_components = lambda engine_input: SimpleNamespace(
            token_ids=[1]
        )
        response_id, stream = await ask(server, background=True, stream=streamed)
        await asyncio.wait(server.background_tasks.values())
        if streamed:
            assert await types(stream) == [*BEGIN, "response.failed"]
        response = await server.retrieve_responses(response_id, None, False)
        assert (response.status, response.error.code) == ("failed", "server_error")

    run(main())


def test_events_that_are_removed_before_they_are_read_are_read(ask):
    async def main():
        server = Serving(fails)
        response_id, stream = await ask(server, background=True, stream=True)
        await asyncio.wait(server.background_tasks.values())
        again = await server.retrieve_responses(response_id, None, True)
        server.event_store.clear()
        for events in (stream, again):
            assert await types(events) == [*BEGIN, "response.failed"]

    run(main())


def test_a_task_removes_itself_alone(ask):
    """A client can choose the request ID, and choose one twice."""

    async def main():
        server = Serving(runs)
        response_id, _ = await ask(server, background=True, request_id="resp_1")
        first = server.background_tasks[response_id]
        await ask(server, background=True, request_id="resp_1")
        second = server.background_tasks[response_id]
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0)
        assert server.background_tasks == {response_id: second}
        second.cancel()
        await asyncio.wait([second])

    run(main())
