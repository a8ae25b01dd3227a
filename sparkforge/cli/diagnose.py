"""Commands that find faults, or show that there are none."""

import os
from dataclasses import replace
from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli.build import chosen_stack
from sparkforge.cli.command import caller_path, in_laboratory, task, whole_number
from sparkforge.core import paths
from sparkforge.core.console import Steps, echo, echo_json, say
from sparkforge.core.errors import UsageError
from sparkforge.core.files import read_json
from sparkforge.core.process import call, run_unchecked


@task(
    example="./inv doctor --bundle support.tar.gz",
    log="a log to read instead of ours; - is stdin",
    state="a state folder, if not this checkout's .sparkforge",
    json_="print the findings as JSON",
    bundle="write a redacted support archive, such as support.tar.gz",
)
def doctor(_ctx: Context, log: str = "", state: str = "", json_: bool = False, bundle: str = "") -> None:
    """Print what is wrong, why, and the next command.

    Reads logs, validation reports, builds, the Docker engine and the machine.
    """
    from sparkforge.doctor.doctor import main

    log = log if log == "-" else caller_path(log)
    main(log=log, state=caller_path(state), as_json=json_, bundle=caller_path(bundle))


@task(
    example="./inv validate --model ~/models/gpt-oss-20b",
    profile="embedded, gpu or spark: which checks are required",
    stack="the stack of pins.toml that is installed; default: the profile's",
    model="folder of a gpt-oss checkpoint; default: the tiny one",
    port="port that the server will use",
    python="interpreter of the server; default: that of embedded `./inv up`",
    json_="print the report as JSON",
)
def validate(
    _ctx: Context,
    profile: str = "embedded",
    stack: str = "",
    model: str = "",
    port: str = "8000",
    python: str = "",
    json_: bool = False,
) -> None:
    """Run the checks that a server must pass before it starts.

    Runs in the environment that would serve. Exit code 0 means that the server may start.
    """
    from sparkforge.plan import capabilities
    from sparkforge.serve import command_line, profiles, settings
    from sparkforge.serve.devices import in_environment
    from validate.profiles import named

    stack = chosen_stack(stack) if stack else named(profile).stack
    number = whole_number("--port", port)
    if not 0 < number < 65536:
        raise UsageError(f"--port {port} is not a port", "ports are 1 to 65535", "--port 8000")
    if model and not Path(caller_path(model)).is_dir():
        raise UsageError(f"--model {model[:80]} is not a folder", "it takes a checkpoint's folder", "without --model")
    default = (
        settings.DEFAULTS[profile][0] if profile in settings.DEFAULTS else capabilities.find(os.environ)[1].profile
    )
    interpreter = Path(caller_path(python)) if python else in_environment.prepare_environment(Steps(1)).python
    directory = Path(caller_path(model)) if model else in_environment.write_tiny(interpreter)
    family = settings.family(str(directory))
    serve_profile = profiles.named(default, stack=stack, family=family)
    report = paths.state() / "validation.json"
    command: list[str | Path] = [interpreter, "-m", "validate", "--profile", profile, "--stack", stack]
    command += ["--layers", "--json", report, "--model", directory, "--port", str(number)]
    command += ["--serve-args", *serve_profile.arguments()]
    variables = {**command_line.ENVIRONMENT, **serve_profile.variables()}
    report.unlink(missing_ok=True)
    if json_:
        result = run_unchecked(command, cwd=paths.ROOT, env=variables)
        code = result.returncode
        if report.exists():
            echo_json(read_json(report))
        else:
            say(result.stderr)
    else:
        code = call(command, cwd=paths.ROOT, env=variables)
    if not code and not report.exists():
        why = "it wrote no report: is it a Python interpreter?"
        raise UsageError(f"cannot validate with {interpreter}", why, "without --python")
    if code:
        raise Exit(code=code)


@task(
    example="./inv qualify --model ~/models/gpt-oss-120b",
    device="gpu or embedded; default: gpu where an NVIDIA driver is loaded",
    model="folder of a gpt-oss checkpoint to start, gate and benchmark too",
    python="with device gpu: interpreter of your own environment",
    profile="serve profile; default: the device's",
    again="run finished parts again",
)
def qualify(
    _ctx: Context, device: str = "", model: str = "", python: str = "", profile: str = "", again: bool = False
) -> None:
    """Run the tests for the hardware ledger, and write one report.

    It serves without a container. A killed run continues with its unfinished parts. The report holds no name, address
    or path of this machine; it is .sparkforge/qualify/report.json, with report.html for people.
    """
    from sparkforge.image.devices import EMBEDDED, GPU
    from sparkforge.qualify import report
    from sparkforge.qualify.report import SHAPES, Qualification
    from sparkforge.serve import launch
    from sparkforge.serve.devices.choose import has_driver
    from sparkforge.serve.devices.in_environment import Embedded, Gpu
    from sparkforge.serve.record import StartPlan

    device = device or (GPU if has_driver() else EMBEDDED)
    if device not in (GPU, EMBEDDED):
        raise UsageError(f"--device {device} cannot be qualified", "choose gpu or embedded", "./inv qualify")
    kind, python = Gpu if device == GPU else Embedded, caller_path(python) if python else ""
    plan = StartPlan(device, profile=profile, python=python, trial=True)
    own = kind(replace(plan, model=caller_path(model))) if model else None
    folder = paths.state() / "qualify"
    with launch.alone():
        launch.refuse_second("./inv qualify")
    finished = report.qualify(Qualification(kind(plan), own, folder, SHAPES[device]), again=again)
    report.print_report(finished)
    echo(str(folder / "report.json"))


@task(example="./inv qualify.accept report.json", report="report.json of a DGX Spark")
def qualify_accept(_ctx: Context, report: str) -> None:
    """Write a Spark's report into the hardware ledger and its page."""
    in_laboratory("ledger", caller_path(report))
