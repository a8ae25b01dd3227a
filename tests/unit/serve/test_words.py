"""Arguments of `docker run` after the image's name, as deploy/start and the entrypoint read them."""

import os
import subprocess

import pytest
from programs import write_program

from sparkforge.core import paths
from sparkforge.core.errors import UsageError, with_remark
from sparkforge.core.paths import ROOT
from sparkforge.core.vllm_flags import flag_value
from sparkforge.models import local
from sparkforge.serve import access, entrypoint, settings
from sparkforge.serve.devices import in_environment
from sparkforge.serve.devices.container import Container
from sparkforge.serve.entrypoint import ContainerArguments
from sparkforge.serve.record import StartPlan

MODEL = "openai/gpt-oss-120b"
FLAGS = ("--max-model-len", "8192")
API_SERVER = "vllm.entrypoints.openai.api_server"
SERVERS = {
    "vllm serve": ["vllm", "serve", MODEL, *FLAGS],
    "serve": ["serve", MODEL, *FLAGS],
    "a bare model": [MODEL, *FLAGS],
    "--model": [*FLAGS, "--model", MODEL],
    "--model=": [f"--model={MODEL}", *FLAGS],
    "vllm serve --model": ["vllm", "serve", *FLAGS, f"--model={MODEL}"],
    "the module": ["python3", "-m", API_SERVER, "--model", MODEL, *FLAGS],
}


@pytest.fixture
def image(monkeypatch, tmp_path):
    """The variables of the Spark's image, and a snapshot of the model in a mounted cache; returns the snapshot."""
    for name in [name for name in os.environ if name.startswith(("SPARKFORGE_", "HF_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub/models--openai--gpt-oss-120b/snapshots/c1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_every_form_of_a_request_is_read_and_values_of_flags_are_no_models():
    for arguments in SERVERS.values():
        assert entrypoint.read_arguments(arguments) == ContainerArguments(MODEL, FLAGS)
    assert entrypoint.read_arguments([*FLAGS]) == ContainerArguments("", FLAGS)
    assert entrypoint.read_arguments(["validate", "a", *FLAGS]) == ContainerArguments("a", FLAGS, only_validate=True)
    flags = ("--dtype", "auto", "-tp", "2", "-O3", "--hf_config_path", "c/d", "--served-model-name", "a", "b")
    assert entrypoint.read_arguments([*flags]) == ContainerArguments("", flags)
    assert entrypoint.read_arguments([MODEL, *flags, "--a-new-flag", "x/y"]).model == MODEL


@pytest.mark.parametrize("flags", ["--max-model-len 4", "--enforce-eager", "--a-new-flag", "-tp 2", "--"])
@pytest.mark.parametrize("start", ["vllm serve", ""])
def test_two_models_are_refused_and_one_after_flags_is_never_taken_for_the_default(start, flags):
    with pytest.raises(UsageError, match="'openai/gpt-oss-120b' is ambiguous") as refused:
        entrypoint.read_arguments([*start.split(), *flags.split(), MODEL])
    assert "put the model first" in refused.value.fix
    with pytest.raises(UsageError):
        entrypoint.read_arguments([*start.split(), *flags.split(), "/models/mine", "--max-num-seqs", "2"])
    with pytest.raises(UsageError, match="two models are named: a/b and c/d"):
        entrypoint.read_arguments([*start.split(), "a/b", "--model", "c/d"])


def plan(arguments, **variables):
    return entrypoint.plan(settings.read({**os.environ, **variables}), entrypoint.read_arguments(arguments))


def test_the_snapshot_is_served_under_the_name_that_was_typed(image):
    server = plan(SERVERS["vllm serve"])
    assert (server.model, server.model_id) == (str(image), MODEL)
    assert server.environment["HF_HUB_CACHE"] == str(image.parents[2])  # where a draft model is looked up
    assert server.arguments.count("--model") == 1
    named = plan([], SPARKFORGE_MODEL=MODEL)
    assert (named.model, named.model_id) == (str(image), MODEL)
    assert "8192" not in named.arguments


def test_a_token_that_was_mounted_with_the_cache_is_named(no_models, image, capsys):
    plan([MODEL])
    assert "token" not in capsys.readouterr().err
    local.MOUNTED.mkdir(parents=True)
    (local.MOUNTED / "token").write_text("hf_secret")
    plan([MODEL])
    noted = capsys.readouterr().err
    assert f"the server can read your token {local.MOUNTED}/token" in noted
    assert f":{local.MOUNTED}/hub:ro" in noted
    assert "hf_secret" not in noted


def test_variables_become_arguments_after_the_profiles_and_vllm_args_stays_out_of_the_environment(image, monkeypatch):
    monkeypatch.setenv("VLLM_ARGS", "--max-num-seqs 8 --chat-template '/my templates/a b'")
    server = plan([MODEL, "--max-num-seqs=3"], SPARKFORGE_TP="2", SPARKFORGE_MAX_MODEL_LEN="16384")
    numbers = ("--tensor-parallel-size=2", "--max-model-len=16384", "--max-num-seqs", "8")
    assert server.extra_arguments == (*numbers, "--chat-template", "/my templates/a b", "--max-num-seqs=3")
    assert flag_value(server.arguments, "--max-model-len") == "16384"
    assert "VLLM_ARGS" not in server.environment  # unknown to vLLM: the check unknown-environment would report it


def test_a_start_without_a_container_takes_the_same_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("INV_CWD", str(tmp_path))
    variables = {"SPARKFORGE_MODEL": "m", "SPARKFORGE_MODEL_ID": "id", "VLLM_ARGS": "--seed 1 --chat-template ./c"}
    completed = settings.with_variables(StartPlan("embedded", flags=("--seed", "2")), {**os.environ, **variables})
    assert (completed.model, completed.model_id) == (f"{tmp_path}/m", "id")
    assert completed.flags == ("--seed", "1", "--chat-template", f"{tmp_path}/c", "--seed", "2")
    assert settings.with_variables(StartPlan("embedded"), {"SPARKFORGE_MODEL": settings.TINY}) == StartPlan("embedded")
    with pytest.raises(UsageError, match="--api-key cannot be passed"):
        settings.with_variables(StartPlan("embedded"), {"VLLM_ARGS": "--api-key sesame"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "zz") for name in (*settings.CHOICES, *settings.FORMS)),
        ("SPARKFORGE_STACK", "zz"), ("SPARKFORGE_SERVE_PROFILE", "zz"), ("SPARKFORGE_BIND", "zz"),
        *(("SPARKFORGE_ALLOWED_HOSTS", text) for text in ("http://x", "a b", "x:port", "[::1")),
        *(("SPARKFORGE_LIMITS", text) for text in ("sequences", "sequences=-1", "sequence=1", "n=²")),
        *(("VLLM_ARGS", text) for text in ("'", "--model x/y", "--model=x/y")),
        *(("TP", text) for text in ("0", "x", "1.5", "9" * 5000, "\u0663")),
        ("MAX_MODEL_LEN", "-1"), *(("SPARKFORGE_VALIDATE_SECONDS", value) for value in ("0", "0.0", "86400", "inf")),
        *(("SPARKFORGE_GUARD_GIB", value) for value in ("3g", "-1", "nan")),
    ],
)  # fmt: skip
def test_a_variable_without_a_meaning_is_refused_by_every_device_before_it_makes_anything(monkeypatch, name, value):
    with pytest.raises(UsageError, match=name) as caught:
        settings.read({name: value})
    assert caught.value.fix.startswith((f"{name}=", f"unset {name}", "SPARKFORGE_MODEL="))
    assert len(caught.value.what) < 100
    monkeypatch.setenv(name, value)
    for device in (
        lambda: in_environment.Embedded(StartPlan("embedded")),
        lambda: Container(StartPlan("docker"), None),
    ):
        with pytest.raises(UsageError, match=name):
            device()


def test_the_advised_value_of_each_variable_is_taken():
    examples = {name: values[-1] for name, values in settings.CHOICES.items()}
    examples |= {name: example for name, (_, _, example) in settings.FORMS.items()}
    assert settings.read({**examples, "SPARKFORGE_GUARD_GIB": "0"}).refused == settings.HOLD


def test_an_address_that_other_machines_reach_needs_a_key():
    for loopback in ("127.0.0.1", "::1", "[::1]", "127.3.2.1", "localhost"):
        access.require_key(loopback, "")
    for address in ("0.0.0.0", "::", "192.168.1.7", "[fe80::1]"):  # noqa: S104 - what is refused
        with pytest.raises(UsageError, match="would open the server without an API key"):
            access.require_key(address, "")
        access.require_key(address, "sesame")
    with pytest.raises(UsageError, match="'eth0' is not an address"):
        access.require_key("eth0", "sesame")


def test_a_network_card_tells_the_machines_network_from_a_containers(tmp_path):
    for card, is_host in (("eth0", False), ("enp1s0/device", True)):
        (tmp_path / card).mkdir(parents=True)
        assert access.has_host_network(tmp_path) == is_host


@pytest.mark.parametrize("host", ["3f2a00bb11cc", "spark"])
def test_the_next_command_has_the_files_that_compose_was_given(set_hostname, monkeypatch, tmp_path, host):
    set_hostname(host)
    monkeypatch.setenv("SPARKFORGE_COMPOSE_FILE", "a.yml:my b.yml")
    again = f"docker start {host}   # after a change of Compose's settings: " if host != "spark" else ""
    advice = paths.where_it_runs(entrypoint.start_again(), tmp_path)  # as in an image
    assert advice == with_remark(f"{again}docker compose -f a.yml -f 'my b.yml' up -d", "on the host")


def start(tmp_path, *arguments):
    """Run deploy/start on test folders, with a stand-in for the image's Python that prints its arguments."""
    root = tmp_path / "opt"
    for name in ("python", "vllm"):
        write_program(root / "bin" / name, f'printf "%s|" {name} "$@"')
    (root / "key").write_text("k\n")
    script = (ROOT / "deploy/start").read_text(encoding="utf-8")
    script = script.replace("/opt/venv", str(root)).replace("root=/opt/sparkforge", f"root='{root}'")
    environment = {"PATH": f"{root}/bin:/usr/bin:/bin", "SPARKFORGE_CACHE_DIR": str(tmp_path)}
    command = ["/bin/sh", "-c", script, "start", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        *(
            (words, "|".join(("python", "-m", "sparkforge.serve.entrypoint", *words, "")))
            for words in (*SERVERS.values(), [], list(FLAGS), ["validate"], ["tiny"], ["/models"])
        ),
        (["python", "-c", "import vllm"], "python|-c|import vllm|"),
        (["vllm", "bench", "serve"], "vllm|bench|serve|"),
        (["/bin/echo", "one", "two words"], "one two words\n"),
    ],
)
def test_servers_and_validations_go_to_the_entrypoint_and_other_programs_run_unchanged(tmp_path, arguments, printed):
    assert start(tmp_path, *arguments) == printed


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ([], MODEL),
        (["--served-model-name", "gpt-oss-120b", "--enforce-eager"], "gpt-oss-120b"),
        (["--served_model_name=chat", "--enforce-eager"], "chat"),
        (["--served-model-name", "chat", "gpt-4"], "chat"),
    ],
)
@pytest.mark.parametrize("form", ["vllm serve", "the module"])
def test_both_names_answer_whatever_docker_run_names_the_model(image, form, more, first):
    arguments = plan([*SERVERS[form], *more]).arguments
    assert arguments.count("--served-model-name") == 1
    names = arguments[arguments.index("--served-model-name") + 1 : arguments.index("--host")]
    assert names[0] == first
    assert {MODEL, "gpt-oss-120b"} <= set(names)
    assert ("--enforce-eager" in arguments) == ("--enforce-eager" in more)
