"""vLLM's command line: what comes from where, and what wins."""

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.serve.command_line import ServerCommand


def server(**more):
    return ServerCommand("/models/m", "name", "127.0.0.1", 8000, **more)


@pytest.mark.parametrize(
    ("model_id", "names"),
    [
        ("openai/gpt-oss-120b", ("openai/gpt-oss-120b", "gpt-oss-120b")),
        ("gpt-oss-120b", ("gpt-oss-120b", "openai/gpt-oss-120b")),
        ("gpt-oss-mine", ("gpt-oss-mine",)),
    ],
)
def test_a_model_answers_with_and_without_its_owner(model_id, names):
    arguments = ServerCommand("/models/m", model_id, "127.0.0.1", 8000).arguments
    assert arguments[3 : arguments.index("--host")] == names


@pytest.mark.parametrize("word", ["--hos=0.0.0.0", "--por"])
def test_an_abbreviated_address_is_refused(word):
    with pytest.raises(UsageError, match="vLLM reads --"):
        server(extra_arguments=(word, "9000")).address()


def test_the_address_is_the_last_one_on_the_command_line():
    assert server().address() == ("127.0.0.1", 8000)
    assert server(extra_arguments=("--port=8001", "--host", "::")).address() == ("::", 8001)
    for port in ("none", "0", "65536"):
        with pytest.raises(UsageError, match="is no port"):
            server(extra_arguments=("--port", port)).address()
