"""Serve on the embedded device: the model on disk, the gate, then vLLM's API server in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path

from serve import launch, profiles
from serve.device import refuse_profile
from serve.launch import LOOPBACK, Launch
from serve.record import Server
from serve.settings import STEADY, TINY_ID
from sparkforge import paths
from sparkforge.console import Steps, say
from sparkforge.errors import ModelError, ValidationFailedError
from sparkforge.files import write_json
from sparkforge.process import run

PROFILE = profiles.named("embedded")
FLAGS = PROFILE.words()
ENVIRONMENT = {
    **STEADY,
    **PROFILE.variables(),
    "PYTHONDONTWRITEBYTECODE": "",  # three processes import vLLM; without bytecode each takes 13 s instead of 7
}


def check(model: str, profile: str) -> None:
    """Refuse words that will not do before minutes go into an environment. Raises UsageError or ModelError."""
    refuse_profile(profile)
    if model:
        model_name(paths.typed(model).absolute())


def up(python: Path, model: str, port: int, steps: Steps) -> Server:
    """Bring model, gate and server up, in this order; return the serving server.

    `python` is the environment's interpreter; an empty `model` means the tiny one. Raises ModelError,
    ValidationFailedError, and what `launch.start` raises.
    """
    with steps.step("model") as tell:
        directory = paths.typed(model).absolute() if model else write_tiny(python)
        model_id = model_name(directory) if model else TINY_ID
        tell(f"{model_id} in {directory}")
    with steps.step("validation", "profile embedded") as tell:
        tell(validate(python, directory, port))
    with steps.step("server", "vLLM starts") as tell:
        server = launch.start(describe(python, directory, model_id, port), tell)
        tell("first token received")
    write_json(paths.state() / "up.json", {"seconds": steps.seconds, "model": model_id})
    return server


def describe(python: Path, model: Path, model_id: str, port: int) -> Launch:
    """Return what starts vLLM's API server for `model` on the loopback address."""
    # Not the `vllm` command: this module needs no distribution called vllm.
    command = (
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        model_id,
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        *FLAGS,
    )
    return Launch(
        command,
        {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(paths.state() / "cache" / "vllm")},
        model,
        model_id,
        "embedded",
        port,
    )


def write_tiny(python: Path) -> Path:
    """Write the tiny checkpoint unless it stands intact, and return its folder.

    Runs in the environment of `python`, which holds the Harmony vocabulary.
    """
    directory = paths.state() / "models" / TINY_ID
    run(
        [python, "-m", "serve.tiny", directory],
        cwd=paths.ROOT,
        fix=f"rm -rf {directory}, then run the same command again",
    )
    return directory


def model_name(directory: Path) -> str:
    """Return the id under which the API offers the checkpoint. Raises ModelError if there is none of gpt-oss there."""
    config = directory / "config.json"
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except OSError as error:
        raise ModelError(
            f"no model in {directory}",
            f"cannot read {config.name}: {error.strerror}",
            "./inv up --model FOLDER, where FOLDER holds config.json and the safetensors files",
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"no model in {directory}",
            f"config.json is no JSON object: {error}",
            "copy or download the checkpoint again",
        ) from error
    if kind != "gpt_oss":
        raise ModelError(
            f"{directory.name} is no gpt-oss model",
            f"its model_type is {kind!r}",
            "./inv up --model FOLDER with a gpt-oss checkpoint in MXFP4",
        ) from None
    return directory.name


def validate(python: Path, model: Path, port: int) -> str:
    """Run the gate in the environment that will serve; return its verdict in one line. Raises ValidationFailedError."""
    report = paths.state() / "validation.json"
    command: list[str | Path] = [python, "-m", "validate", "--profile", "embedded", "--json", report]
    command += ["--model", model, "--host", LOOPBACK, "--port", str(port), "--serve-args", *FLAGS]
    done = run(command, cwd=paths.ROOT, env=ENVIRONMENT, check=False)  # judged under what the server will see
    if done.returncode:
        say(done.stdout + done.stderr)
        raise ValidationFailedError(
            "the validator refuses to serve",
            f"it ended with code {done.returncode}; its report is above",
            "follow the line after `next:` under each FAIL, then ./inv up",
        )
    return done.stdout.strip().splitlines()[-1]
