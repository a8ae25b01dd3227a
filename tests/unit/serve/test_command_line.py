"""vLLM's command line: what comes from where, and what wins."""

import pytest

from sparkforge.core.errors import InputError, UsageError
from sparkforge.serve import access, profiles
from sparkforge.serve.command_line import ServerCommand, served_name


def server(**more):
    return ServerCommand("/models/m", "name", "127.0.0.1", 8000, **more)


def test_the_model_the_profile_and_the_extra_arguments_come_in_this_order():
    profile = profiles.named("embedded")
    arguments = server(profile=profile, extra_arguments=("--max-model-len", "9")).arguments
    assert arguments[:4] == ("--model", "/models/m", "--served-model-name", "name")
    assert arguments[8 : 8 + len(profile.arguments())] == profile.arguments()
    assert arguments[-4:-2] == ("--max-model-len", "9")
    assert server().command("/python")[:3] == ("/python", "-m", "vllm.entrypoints.openai.api_server")


@pytest.mark.parametrize(
    ("model_id", "names"),
    [
        ("openai/gpt-oss-120b", ("openai/gpt-oss-120b", "gpt-oss-120b")),
        ("gpt-oss-120b", ("gpt-oss-120b", "openai/gpt-oss-120b")),
        ("somebody/gpt-oss-20b-medical", ("somebody/gpt-oss-20b-medical", "gpt-oss-20b-medical")),
        ("gpt-oss-mine", ("gpt-oss-mine",)),
        ("tiny-gpt-oss", ("tiny-gpt-oss",)),
    ],
)
def test_a_model_answers_with_and_without_its_owner(model_id, names):
    arguments = ServerCommand("/models/m", model_id, "127.0.0.1", 8000).arguments
    assert arguments[3 : arguments.index("--host")] == names


def test_every_server_is_guarded_unless_it_is_for_measuring():
    assert server().arguments[-2:] == ("--middleware", "sparkforge.serve.access.Guard")
    with_key = server(extra_environment={access.KEY: "sesame"})
    assert with_key.arguments[-1] == "--disable-fastapi-docs"
    assert "sesame" not in repr(with_key)
    assert not server(guarded=False).arguments[8:]


def test_no_server_asks_the_network_or_imports_from_its_folder_and_a_callers_variables_win():
    environment = server(profile=profiles.named("safe"), extra_environment={"DO_NOT_TRACK": "0"}).environment
    assert environment["HF_HUB_OFFLINE"] == environment["PYTHONSAFEPATH"] == "1"
    assert environment["VLLM_PLUGINS"] == "spark_mxfp4"
    assert environment["VLLM_HAS_FLASHINFER_CUBIN"] == "1"
    assert environment["DO_NOT_TRACK"] == "0"


@pytest.mark.parametrize("word", ["--hos=0.0.0.0", "--ho", "--por"])
def test_an_abbreviated_address_is_refused(word):
    with pytest.raises(UsageError, match="vLLM reads --"):
        server(extra_arguments=(word, "9000")).address()


def test_the_address_is_the_last_one_on_the_command_line():
    assert server().address() == ("127.0.0.1", 8000)
    assert server(extra_arguments=("--port=8001", "--host", "::")).address() == ("::", 8001)
    for port in ("none", "0", "65536"):
        with pytest.raises(UsageError, match="is no port"):
            server(extra_arguments=("--port", port)).address()


def test_the_name_of_a_checkpoint_is_its_folders(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt_oss"}')
    assert served_name(tmp_path) == tmp_path.name
    for text in ('{"model_type": "llama"}', "[]", "{"):
        config.write_text(text)
        with pytest.raises(InputError, check=lambda error: error.code == "input.model"):
            served_name(tmp_path)
