"""Commands that find out what is wrong, or prove that nothing is."""

from __future__ import annotations

from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli.command import caller_path, task, whole_number
from sparkforge.core import paths
from sparkforge.core.console import Steps, echo_json, say
from sparkforge.core.documents import read_json
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
    profile="embedded, or spark: which checks are required",
    stack="the stack of pins.toml that is installed; default: the profile's",
    model="folder of a gpt-oss checkpoint; default: the tiny one",
    port="port that the server will take",
    python="interpreter that will serve; default: the one that embedded `./inv up` serves with",
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
    from sparkforge.serve import command_line, profiles, settings
    from sparkforge.serve.devices import in_environment
    from validate.profiles import named

    stack = stack or named(profile).stack
    number = whole_number("--port", port)
    interpreter = Path(caller_path(python)) if python else in_environment.prepare_environment(Steps(1)).python
    directory = Path(caller_path(model)) if model else in_environment.write_tiny(interpreter)
    serve_profile = profiles.named(settings.DEFAULTS[profile][0], stack=stack)
    report = paths.state() / "validation.json"
    command: list[str | Path] = [interpreter, "-m", "validate", "--profile", profile, "--stack", stack]
    command += ["--layers", "--json", report, "--model", directory, "--port", str(number)]
    command += ["--serve-args", *serve_profile.arguments()]
    variables = {**command_line.ENVIRONMENT, **serve_profile.variables()}
    if json_:
        report.unlink(missing_ok=True)
        result = run_unchecked(command, cwd=paths.ROOT, env=variables)
        code = result.returncode
        if report.exists():
            echo_json(read_json(report))
        else:
            say(result.stderr)
    else:
        code = call(command, cwd=paths.ROOT, env=variables)
    if code:
        raise Exit(code=code)
