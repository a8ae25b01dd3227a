"""Run a vLLM release's own selector to learn which experts backend it takes for gpt-oss on the DGX Spark.

The release's Python is run from its source archive by an interpreter that has torch and vLLM's other dependencies; the
platform is faked (`ask_vllm.py`). If the release cannot be imported there, the backend stays undetermined.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.upstream import options
from lab.upstream.effect import Column, Effect, Observation, undetermined
from sparkforge.core.errors import ProcessError
from sparkforge.core.process import run
from sparkforge.plan import families
from sparkforge.serve.profiles import ServeProfile

PROGRAM = Path(__file__).with_name("ask_vllm.py")
CAPABILITY = (12, 1)  # GB10
OWN = families.load()[families.default()].experts
MOE_BACKEND = OWN.backends["12.1"]["spark"] if OWN else ""
SECONDS = 300.0  # importing torch and vLLM takes 10 to 40 s on two busy cores
KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")  # no token and no proxy reaches the release's code


@dataclass(frozen=True)
class ReleaseAnswer:
    """The answer of a release's code. `refusal` is the reason if its selector gave none."""

    backend: str = ""
    refusal: str = ""
    profiles: Mapping[str, str] | str = "it was not run"


def ask(python: Path, root: Path, profiles: Mapping[str, ServeProfile]) -> ReleaseAnswer:
    """Run the vLLM under `root` with `python`. A failure of the release is in the answer; none is raised."""
    parser = options.parser_file(root) if profiles else None
    question = {
        "cases": [{"capability": CAPABILITY, "flashinfer": True, "config": {}}],
        "parser": ".".join(parser.relative_to(root).with_suffix("").parts) if parser else "",
        "profiles": {name: profile.arguments() for name, profile in profiles.items()} if parser else {},
    }
    try:
        answer = _run(python, root, question)
    except ProcessError as error:
        why = f"{error.what}: {(error.why.strip().splitlines() or ['it printed nothing'])[-1][:300]}"
        return ReleaseAnswer(refusal=why, profiles=why)
    if answer.get("source") != str(root / "vllm"):
        why = f"{python} imports another vLLM: {answer.get('source')}"
        return ReleaseAnswer(refusal=why, profiles=why)
    selections, parsed = answer["selections"], answer["profiles"]
    if isinstance(parsed, dict) and parsed.keys() == {"error"}:
        parsed = parsed["error"]
    elif parsed is None:
        parsed = "the release has no parser where we look"
    if isinstance(selections, dict):
        return ReleaseAnswer(refusal=selections["error"], profiles=parsed)
    (selection,) = selections
    return ReleaseAnswer(selection["backend"] or f"none ({selection['error']})", profiles=parsed)


def _run(python: Path, root: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """Run the program with only the environment variables that it needs. Raises ProcessError."""
    with TemporaryDirectory(prefix="sparkforge-") as home:
        environment = {
            **dict.fromkeys(name for name in os.environ if name not in KEPT),
            "HOME": home,
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_PLUGINS": "",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": home,
            "VLLM_CONFIG_ROOT": home,
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        text = json.dumps(question)
        output = run([python, "-P", PROGRAM], cwd=Path(home), env=environment, stdin=text, seconds=SECONDS).stdout
    try:
        answer: dict[str, Any] = dict(json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError, TypeError) as error:
        raise ProcessError(
            "vLLM's code gave no answer", "its last line is not JSON", "run the program by hand", code="process.failed"
        ) from error
    return answer


def column(stock: ReleaseAnswer, patched: ReleaseAnswer) -> Column:
    """Compare the backends of the stock and of the patched release to the one that 12.x needs."""
    if stock.refusal:
        return undetermined(f"the selector was not run: {stock.refusal}")
    observations = [Observation(Effect.NONE, f"stock: {stock.backend}")]
    if stock.backend == MOE_BACKEND:
        observations.append(
            Observation(Effect.CHANGED, f"stock takes {MOE_BACKEND} by itself: no patch is needed for it")
        )
    if patched.refusal:
        observations.append(Observation(Effect.UNKNOWN, f"with the queue: {patched.refusal}"))
        return Column(f"stock {stock.backend}; queue not determined", tuple(observations))
    effect = Effect.NONE if patched.backend == MOE_BACKEND else Effect.BREAKS
    requirement = "" if effect is Effect.NONE else f", and 12.x needs {MOE_BACKEND}"
    observations.append(Observation(effect, f"with the queue: {patched.backend}{requirement}"))
    return Column(f"stock {stock.backend}; queue {patched.backend}", tuple(observations))
