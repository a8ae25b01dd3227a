"""Options, variables and flags after `--` that `./inv up` and a container pass to vLLM; no server starts."""

import asyncio
import json
from contextlib import nullcontext

import pytest
from programs import write_program

from sparkforge.cli import program
from sparkforge.cli.serve import UpOptions, planned
from sparkforge.core.errors import UsageError
from sparkforge.core.vllm_flags import flag_value, passable
from sparkforge.image import devices
from sparkforge.serve import access, launch, profiles
from sparkforge.serve.command_line import ServerCommand
from sparkforge.serve.devices import container
from sparkforge.serve.devices.in_environment import Gpu
from sparkforge.serve.record import StartPlan

EVERYWHERE = "0.0.0.0"  # noqa: S104 - nothing is bound
UP = ["up", "--device", devices.EMBEDDED, "--python", "python"]


@pytest.fixture
def started(monkeypatch, tmp_path, unchecked_port):
    """The launches of `./inv up`, which start nothing. A program that notes its arguments stands for Python."""
    launches = []

    def start(launched, _tell):
        launches.append(launched)
        raise UsageError("not started", "by the test", "")

    write_program(tmp_path / "python", f'echo "$*" >> {tmp_path}/arguments\necho serve')
    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setenv("INV_CWD", str(tmp_path))
    for name in ("MODEL", "PORT", "TP", "MAX_MODEL_LEN", access.HOSTS):
        monkeypatch.delenv(name, raising=False)
    return launches


def test_the_competitions_variables_count_where_no_option_says_otherwise(started, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    for name, value in {"MODEL": str(tmp_path), "PORT": "8888", "TP": "1", "MAX_MODEL_LEN": "999"}.items():
        monkeypatch.setenv(name, value)
    program.main(UP)
    program.main([*UP, "--port", "8001"])
    plans = [(launched.plan.model, launched.plan.port, launched.plan.flags) for launched in started]
    assert plans == [(str(tmp_path), port, ("--max-model-len=999",)) for port in (8888, 8001)]
    for name, value, message in (("PORT", "abc", "PORT 'abc' is not valid"), ("TP", "8", "TP=8 has no meaning here")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert program.main(UP) == UsageError.exit_code
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("tp", "refused"), [("", False), ("2", False), ("8", True)])
def test_more_gpus_than_the_machine_has_are_refused(fake_nvidia_smi, monkeypatch, tp, refused):
    monkeypatch.setenv("TP", tp)
    fake_nvidia_smi("one\ntwo")
    for device in (lambda: container.variables(StartPlan("docker")), lambda: Gpu.from_variables({"TP": tp})):
        with pytest.raises(UsageError, match="TP=8 is too many") if refused else nullcontext():
            device()


def test_flags_after_two_dashes_come_last_and_the_validator_sees_them(started, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MAX_MODEL_LEN", "999")
    flags = ["--max-num-seqs", "4", "--chat-template=./x.jinja", "--no-enforce-eager"]
    assert program.main([*UP, "--context", "512", "--quantization", "spark-mxfp4", "--", *flags]) == 2
    (launched,) = started
    wanted = ("--max-model-len=512", *flags[:2], f"--chat-template={tmp_path}/x.jinja", flags[3])
    assert f" {' '.join(wanted)}\n" in (tmp_path / "arguments").read_text()
    assert flag_value(launched.command, "--quantization") == "spark-mxfp4"
    at = launched.command.index("--max-model-len=512")
    assert launched.command[at : at + len(wanted)] == wanted
    assert launched.command.index("--max-num-seqs=18") < at
    output = capsys.readouterr().err
    assert "--max-num-seqs replaces the profile's --max-num-seqs (18)" in output
    assert "--no-enforce-eager replaces the profile's --enforce-eager" in output


@pytest.mark.parametrize(
    ("profile", "gpu", "asked"),
    [
        ("", True, ("spark-mxfp4", ())),
        ("", False, ("embedded", ())),
        ("fast", True, ("fast", ("--quantization=spark-mxfp4",))),
        ("embedded-kv8", False, ("embedded-kv8", ("--quantization=spark-mxfp4",))),
    ],
)
def test_our_experts_are_a_profile_or_a_flag_beside_one(profile, gpu, asked):
    assert profiles.with_quantization("spark-mxfp4", profile, (), gpu=gpu) == asked
    for same in ("", "mxfp4"):
        assert profiles.with_quantization(same, profile, ("-O3",), gpu=gpu) == (profile, ("-O3",))
    if profile in ("", "fast") and gpu:
        served = profiles.named(asked[0]).arguments() + asked[1]
        assert flag_value(served, "--quantization") == "spark-mxfp4"
    for stock in ("fast-dense-8", "fast-dense-4"):  # profiles with vLLM's experts
        with pytest.raises(UsageError, match=f"has no effect with --profile {stock}"):
            profiles.with_quantization("spark-mxfp4", stock, (), gpu=True)


@pytest.mark.parametrize(
    ("options", "failure", "fix"),
    [
        # Flags that would break the proof or the address
        ("-- --hos 0.0.0.0", "--hos, which vLLM reads as --host, cannot", "./inv up --host"),
        ("-- --enforce-eager --served_model_name x", "--served-model-name cannot", "./inv up --model"),
        ("-- --api-key x", "--api-key cannot", "--api-key-file"),
        ("-- --hf-token hf_x", "--hf-token cannot", "hf auth login"),
        ("-- --middleware x.y", "--middleware cannot", "proxy"),
        ("-- --no-enable-auto-tool-choice", "--no-enable-auto-tool-choice cannot", "leave it out"),
        ("-- --enforce-eager -- b", "-- cannot", "./inv up --"),
        ("-- --nnodes 2", "--nnodes cannot", "./inv cluster.discover"),
        ("-- --help", "--help cannot", "vLLM's flags"),
        ("-- a-model", "'a-model' is not a flag", "./inv up --"),
        # Another quantization
        ("--quantization fp8", "--quantization 'fp8' is not known", "./inv up -- --quantization fp8"),
        ("--quantization spark-mxfp4 -- -qmxfp4", "-qmxfp4 is also among the flags after --", "-- -qmxfp4"),
        # A context of no length, and an address that is open or none
        ("--context 0", "--context '0' is not a length", ""),
        ("--context 512 -- --max_model_len 256", "--context 512 and --max-model-len 256", ""),
        ("--host spark.local", "--host 'spark.local' is not an IP address", ""),
        ("--host 192.168.1.20", "--host 192.168.1.20 needs --api-key-file", ""),
        ("--host ::", "--host :: needs --api-key-file", ""),
    ],
)
@pytest.mark.parametrize("device", [devices.EMBEDDED, devices.DOCKER_CPU])
def test_what_would_break_the_proof_or_open_the_server_is_refused(started, capsys, device, options, failure, fix):
    assert program.main(["up", "--device", device, *options.split()]) == UsageError.exit_code
    output = capsys.readouterr().err
    assert failure in output
    assert fix in output.rpartition("next:")[2]
    assert started == []


LOOPBACK = "localhost:8000,127.0.0.1:8000,[::1]:8000"


@pytest.mark.parametrize(
    ("host", "more", "hosts"),
    [
        ("", "", LOOPBACK),
        ("127.0.0.2", "", f"{LOOPBACK},127.0.0.2:8000"),
        ("::1", "", LOOPBACK),
        (EVERYWHERE, "--api-key-file key", "*"),
        (EVERYWHERE, "--api-key-file key --allow-hosts spark.local", f"{LOOPBACK},spark.local"),
        ("192.168.1.20", "--api-key-file key", f"{LOOPBACK},192.168.1.20:8000"),
    ],
)
def test_an_address_that_others_reach_has_a_key_and_each_its_names(started, key_file, tmp_path, host, more, hosts):
    program.main([*UP, *(["--host", host] if host else []), *more.split()])
    (launched,) = started
    assert (launched.plan.host, launched.plan.key) == (host, "sesame" if more else "")
    assert flag_value(launched.command, "--host") == launched.plan.address == (host or "127.0.0.1")
    assert f"--host {launched.plan.address} --port 8000" in (tmp_path / "arguments").read_text()  # the validator's
    assert launched.environment[access.HOSTS] == hosts


@pytest.fixture
def compose(fake_engine, docker_command):
    """Return a function: Compose files whose service has the given variables too; returns the calls of docker."""

    def compose(**variables):
        service = {
            "image": "sparkforge/vllm:embedded",
            "ports": [{"host_ip": "127.0.0.1", "published": "8000", "target": 8000}],
            "environment": {"SPARKFORGE_PROFILE": "embedded", "SPARKFORGE_STACK": "embedded", **variables},
        }
        docker_command.answers("compose version", out="Docker Compose version 2.26.1\n")
        docker_command.answers("config --format json", out=json.dumps({"services": {"vllm": service}}))
        return docker_command

    return compose


def test_up_passes_options_and_flags_to_compose(key_file, monkeypatch, tmp_path):
    """The command's option overrides MAX_MODEL_LEN of the environment."""
    monkeypatch.setenv("INV_CWD", str(tmp_path))
    monkeypatch.setenv("MAX_MODEL_LEN", "999")
    options = {"host": "192.168.1.20", "api_key_file": "key", "context": "512"}
    flags = ("--chat-template=./b", "--seed", "d e")
    plan = planned(UpOptions(device=devices.DOCKER_CPU, vllm_flags=flags, **options))
    env = container.variables(plan)
    assert (env["SPARKFORGE_BIND"], env["MAX_MODEL_LEN"]) == ("192.168.1.20", "512")
    assert env["VLLM_ARGS"] == "--chat-template=./b --seed 'd e'"  # a path in the container is not changed
    assert env[access.HOSTS].endswith(",192.168.1.20:8000")
    own = container.variables(planned(UpOptions(device=devices.DOCKER_CPU)))
    assert not {"SPARKFORGE_BIND", "VLLM_ARGS", access.HOSTS} & own.keys()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"host": EVERYWHERE}, "--host 0.0.0.0 has no effect"),
        ({"flags": ("--a", "1")}, "the flags --a 1 have no effect"),
        ({"profile": "embedded-dense-8"}, "--profile embedded-dense-8 has no effect"),
    ],
)
def test_compose_files_that_leave_out_what_was_asked_for_are_named(compose, wanted, message):
    """If a user's own Compose file publishes another address or passes no flags on, nothing starts."""
    docker = compose()
    with pytest.raises(UsageError) as caught:
        container.Container(StartPlan(devices.DOCKER_CPU, **wanted), None).prepare()
    assert caught.value.what == message
    assert not [call for call in docker.calls if " up " in call]


@pytest.mark.parametrize("inside", [{}, {profiles.KERNEL_VARIABLE: "triton"}])
def test_a_kernel_of_the_shell_that_the_container_does_not_get_is_refused(compose, monkeypatch, inside):
    monkeypatch.setenv(profiles.KERNEL_VARIABLE, "fast_moe:FastMoe")
    compose(**inside)
    with pytest.raises(UsageError, match="fast_moe:FastMoe has no effect") as caught:
        container.Container(StartPlan(devices.DOCKER_CPU), None).prepare()
    assert "vllm.env" in caught.value.fix
    assert "--device embedded" in caught.value.fix


def server(model_id="name", **more):
    return ServerCommand("/models/m", model_id, "127.0.0.1", 8000, **more)


@pytest.mark.parametrize(
    ("model_id", "names"),
    [
        ("openai/gpt-oss-120b", ("openai/gpt-oss-120b", "gpt-oss-120b")),
        ("gpt-oss-120b", ("gpt-oss-120b", "openai/gpt-oss-120b")),
        ("gpt-oss-mine", ("gpt-oss-mine",)),
    ],
)
def test_a_model_answers_with_and_without_its_owner(model_id, names):
    arguments = server(model_id).arguments
    assert arguments[3 : arguments.index("--host")] == names


@pytest.mark.parametrize(("trusted", "client"), [("", "127.0.0.1"), ("127.0.0.1", "10.1.1.1")])
def test_only_a_proxy_that_the_user_names_tells_who_the_client_is(monkeypatch, trusted, client):
    headers = pytest.importorskip("uvicorn.middleware.proxy_headers")  # with vLLM; `./inv test --fast` has none
    monkeypatch.setenv(access.PROXIES, trusted) if trusted else monkeypatch.delenv(access.PROXIES, raising=False)
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope["client"][0])

    scope = {"type": "http", "client": ("127.0.0.1", 5000), "headers": [(b"x-forwarded-for", b"10.1.1.1")]}
    asyncio.run(headers.ProxyHeadersMiddleware(app, server().environment[access.PROXIES])(scope, None, None))
    assert seen == [client]


def test_the_address_is_the_last_one_on_the_command_line():
    assert server().address() == ("127.0.0.1", 8000)
    assert server(extra_arguments=("--port=8001", "--host", "::")).address() == ("::", 8001)
    for port in ("none", "0", "65536"):
        with pytest.raises(UsageError, match="is not a port"):
            server(extra_arguments=("--port", port)).address()
    for abbreviated in ("--hos=0.0.0.0", "--por"):
        with pytest.raises(UsageError, match="vLLM reads --"):
            server(extra_arguments=(abbreviated, "9000")).address()


def test_a_flag_whose_name_only_begins_like_a_refused_one_passes():
    flags = ("--model-impl", "auto", "--uvicorn-log-level=info", "-O3", "--config-format", "hf")
    assert passable(flags, relative_to=None) == flags


def test_the_last_occurrence_wins_and_underscores_in_a_flag_are_hyphens():
    assert flag_value(("--port=1", "--host", "::1", "--port", "2"), "--port") == "2"
    assert flag_value(("--port=",), "--port") == ""
    assert flag_value(("--portal", "9000"), "--port") is None
    assert flag_value(["--kv_cache_dtype", "fp8_e4m3"], "--kv-cache-dtype") == "fp8_e4m3"
    assert flag_value(["--served_model_name=a_b=c"], "--served-model-name") == "a_b=c"
    assert flag_value(["-tp=2", "-qspark-mxfp4", "-n=2"], "--quantization") == "spark-mxfp4"
    assert flag_value(["-1", "-", "-n4"], "--nnodes") == "4"
