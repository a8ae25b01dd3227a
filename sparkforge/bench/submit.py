"""Posts a passed result to the URL of a board, without secrets, once per URL.

A post in our JSON form has the result's digest as Idempotency-Key, so that the same command can be run again. The
result's file is kept.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from sparkforge import pins
from sparkforge.bench import baselines, runs, schema
from sparkforge.bench.baselines import Baselines
from sparkforge.bench.context import read_table
from sparkforge.bench.schema import Gate, Result
from sparkforge.core import http
from sparkforge.core.console import say
from sparkforge.core.errors import BenchmarkError, InputError, NetworkError, UsageError
from sparkforge.core.files import parse_json, write_json
from sparkforge.core.openai import require_url, uses_proxy
from sparkforge.core.redact import for_support
from sparkforge.plan.speed import CitedFigure

TIMEOUT = httpx.Timeout(30.0)
ANSWER_SECONDS = 120.0  # for the board's whole answer
ANSWER_BYTES = 1 << 20
EVENT = re.compile(r"[\w-]{1,100}")
BOARD = "board"  # for --to: the competition's board for the result's shape
FORMS = JSON, GRADIO = "json", "gradio"  # ours, and the competition's


@dataclass(frozen=True)
class Destination:
    """The destination of results: `to` is a URL, `board` for the competition's boards, or empty for none."""

    team: str
    to: str
    form: str

    def is_competition(self, table: Baselines) -> bool:
        """Return whether this is the competition's board, or another one that takes the competition's form."""
        own = self.to.rstrip("/") in table.competition.boards.values()
        return self.to == BOARD or self.form != JSON or own

    def command(self, result: Path, to: str) -> str:
        """Return the command that posts a result there later."""
        form = ["--form", self.form] if self.form != JSON else []
        return shlex.join(["./inv", "bench.submit", self.team, "--result", str(result), "--to", to, *form])


def main(flags: Mapping[str, Any]) -> None:
    """Measure or read, then post. Raises the errors of a measurement, UsageError, BenchmarkError, NetworkError."""
    team, to, form = flags["team"].strip(), flags.get("to", ""), flags.get("form", "")
    if not 0 < len(team) <= 80 or not team.isprintable():
        raise UsageError("the team needs a name", "1 to 80 printable characters", "--help   # name the team first")
    destination = Destination(team, to, form or (GRADIO if to == BOARD else JSON))
    if destination.form not in FORMS:
        raise UsageError(f"there is no form {form!r}", f"choose from {', '.join(FORMS)}", "--form json")
    if to and to != BOARD:
        require_url(to, "--to", f"--to https://HOST/PATH, or --to {BOARD}")
    table = baselines.load()
    if path := flags.get("result"):
        result = schema.read(Path(path))
        if not result.passed:
            why, fix = "; ".join(result.reasons), "--help   # submit a result that passed"
            raise InputError(f"{Path(path).name} did not pass", why, fix, code="input.result")
        deliver(Path(path), result, destination, table)
        return
    to_board = bool(to) and destination.is_competition(table)
    if to_board:
        prepared = runs.prepare(flags)  # checked first, so that a result is not refused after an hour of load
        isl, osl = prepared.settings.number("isl"), prepared.settings.number("osl")
        _refuse(find_differences(table, prepared.endpoint.model, prepared.passage.sha256, (isl, osl), to))
    outcome = runs.measure(flags, lambda gate: _refuse(find_excesses(table, gate) if to_board else []))
    for file, result in zip(outcome.files, outcome.results, strict=True):
        if result.passed:
            deliver(file, result, destination, table)
    outcome.require()


def find_differences(table: Baselines, model: str, text_sha256: str, shape: tuple[int, int], to: str) -> list[str]:
    """Return the differences of a measurement from the requirements of the competition's boards.

    `shape` is isl and osl. `to` is as in Destination; the board of another shape is a difference.
    """
    board, differences = table.competition, list[str]()
    text = pins.load().texts[board.text]
    if not baselines.matches(board.model, model):
        differences.append(f"the model is {model}, not {board.model}")
    if text_sha256 != text.pinned_files[text.member].sha256:
        differences.append(f"the text is not {board.text}, by its sha256")
    if not (url := board.boards.get(f"{shape[0]}/{shape[1]}")):
        differences.append(f"there is no board for {shape[0]}/{shape[1]}")
    elif to.rstrip("/") in {*board.boards.values()} - {url}:
        own = f"that of {shape[0]}/{shape[1]} is {url}, or --to {BOARD}"
        differences.append(f"{to} is the board of another shape; {own}")
    return differences


def find_excesses(table: Baselines, gate: Gate) -> list[str]:
    """Return a sentence for each figure of the gate that is missing or above the board's limit."""
    excesses = []
    for name, limit in table.competition.at_most.items():
        if (figure := getattr(gate, name)) is None or figure > limit:
            excesses.append(f"{name} is {figure}, and the board takes at most {limit}")
    return excesses


def _refuse(differences: list[str]) -> None:
    if differences:
        failure = "the competition's board does not accept this result"
        fix = "./inv bench.acc --fetch-text hub   # measure gpt-oss-120b on the board's text, then submit"
        raise BenchmarkError(failure, "\n        ".join(differences), fix, code="benchmark.board")


def deliver(path: Path, result: Result, destination: Destination, table: Baselines) -> None:
    """Post one result, unless it was posted before or there is no URL. Raises NetworkError, BenchmarkError."""
    config, gate = result.config, result.gate
    board = table.competition.boards.get(f"{config.isl}/{config.osl}", "")
    if not destination.to:
        say(f"nothing was posted: no --to URL. Later: {destination.command(path, 'URL')}")
        if board:
            command = destination.command(path, BOARD)
            say(f"the competition's board for {config.isl}/{config.osl} is {board}: {command}")
        return
    if destination.is_competition(table):
        shape = config.isl, config.osl
        differences = find_differences(table, config.model, gate.text_sha256, shape, destination.to)
        if gate.chunked_by != "tokens":
            differences.append(f"the text was split by {gate.chunked_by}, not into chunks of 512 tokens")
        _refuse([*differences, *find_excesses(table, gate)])
    url, form = board if destination.to == BOARD else destination.to, destination.form
    record = path.with_suffix(".submitted.json")
    post = {"digest": result.digest, "url": url, "team": destination.team, "form": form}
    earlier = read_table(record)
    if all(earlier.get(name) == value for name, value in post.items()):
        say(f"{path.name} was posted to this URL before; it is not posted again")
        return
    retry_command = destination.command(path, url)
    if form == GRADIO:
        call = f"{url.rstrip('/')}/gradio_api/call/submit_results"
        row = gradio_row(destination.team, result, table.competition_figure(*config.key))
        response = send(call, {"data": row}, retry_command)
        _await_event(call, response, retry_command)
    else:
        body = {"team": destination.team, "result": for_support(result.model_dump(mode="json"))}
        send(url.rstrip("/"), body, retry_command, key=result.digest)
    write_json(record, {**post, "posted_at": datetime.now(UTC).isoformat(timespec="seconds")})
    say(f"posted {path.name} to {url}")


def gradio_row(team: str, result: Result, figure: CitedFigure | None) -> list[str | float]:
    """Return the columns of the competition's form, with 0 for missing figures. Raises InputError without figures.

    `figure` is the competition's baseline for the result's shape. The program gptoss_benchmark (a binary of 2025-12-03
    in danielhua23/amdgpu_inferencemax_bounty) sends the same form.
    """
    m, gate, cited = result.metrics, result.gate, figure.values if figure else {}
    if m is None:
        raise InputError("the result holds no figures", "it did not pass", "./inv bench.perf", code="input.result")
    e2e, tput, each = m.e2el_ms.median, m.tput_per_gpu, m.interactivity
    quantities = ("median_e2el_ms", "tput_per_gpu", "interactivity")
    e2e_b200, tput_b200, each_b200 = (cited.get(name, 0.0) for name in quantities)
    figures = (
        *(result.config.conc, e2e, tput, e2e_b200, tput_b200),
        *(e2e_b200 and e2e / e2e_b200, tput_b200 and tput / tput_b200),
        *(each, each_b200, each_b200 and each and each / each_b200),
        *(gate.bits_per_byte, gate.byte_perplexity, gate.word_perplexity),
    )
    return [team, *(0.0 if value is None else value for value in figures)]


def send(url: str, body: Mapping[str, Any], retry_command: str, key: str = "") -> httpx.Response:
    """POST once, with an Idempotency-Key if `key` is set. Raises NetworkError with `retry_command` as its fix."""
    headers = {"Idempotency-Key": key} if key else {}
    try:
        with httpx.Client(timeout=TIMEOUT, trust_env=uses_proxy(url)) as client:
            response = http.request(
                client, "POST", url, seconds=ANSWER_SECONDS, limit=ANSWER_BYTES, json=body, headers=headers
            )
        if response.is_success:
            return response
        why = f"HTTP {response.status_code}: {response.text[:200]}"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        why = repr(error)
    except httpx.HTTPError as error:
        why = f"{error!r}; it may have arrived"
    raise NetworkError("the result was not posted; its file is kept", why, retry_command, code="network.submit")


def _await_event(call: str, response: httpx.Response, retry_command: str) -> None:
    """Read Gradio's response stream. Raises NetworkError unless it has the event `complete`."""
    unknown, look = "it is unknown whether the board accepted the result", f"look at the board; {retry_command}"
    last = ""
    try:
        event = EVENT.fullmatch(parse_json(response.content, call)["event_id"])
        if event is None:
            raise NetworkError(unknown, "its event_id is malformed", look, code="network.submit")
        with (
            httpx.Client(timeout=TIMEOUT, trust_env=uses_proxy(call)) as client,
            client.stream("GET", f"{call}/{event[0]}") as stream,
        ):
            if stream.is_success:
                for message in http.events(stream, ANSWER_SECONDS):
                    if message.event == "complete":
                        return
                    last = f"{message.event}: {message.data}"
            else:
                answer = http.whole(stream, seconds=ANSWER_SECONDS, limit=ANSWER_BYTES)
                last = f"HTTP {answer.status_code}: {answer.text}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        why = f"it was sent, and then: {error!r}"
        raise NetworkError(unknown, why, look, code="network.submit") from error
    failure = "the board refused the result; its file is kept"
    raise NetworkError(failure, last[:200] or "no answer", retry_command, code="network.submit")
