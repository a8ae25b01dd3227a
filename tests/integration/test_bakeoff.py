"""A bake-off of two profiles on real vLLM: each serves the trained tiny model and runs test calls, gate and load."""

import json
import sys
from pathlib import Path

import pytest

from sparkforge.bench import bakeoff
from sparkforge.core import paths
from sparkforge.image.devices import EMBEDDED
from sparkforge.models.tiny import write_tiny
from sparkforge.serve import launch, proof, record
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan
from validate.facts import machine

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
LOAD = {"isl": "32", "osl": "8", "conc": "2", "num_prompts": "4", "warmups": "0"}


def test_profiles_are_served_gated_and_ranked(tmp_path, free_port, forking):
    model, port = write_tiny(tmp_path / "tiny-gpt-oss"), free_port()
    limits = {}

    def start(request):
        """Start as on the embedded device, but without an environment and a validation, which take minutes."""
        described = in_environment.Embedded(request, Path(sys.executable), model).launch()
        with launch.starting():
            server = launch.start(forking(described), lambda _: None)
        limits[request.profile] = {name for name, limit in server.proof.items() if limit}
        return server

    request = StartPlan(EMBEDDED, model=str(model), port=port)
    other = "embedded-kv8" if "avx512f" in machine.cpu_flags(None) else "embedded-dense-8"
    bakeoff.run(["embedded", other, "embedded-ngram"], LOAD, request, start)
    stored = json.loads((paths.state() / "bakeoff.json").read_text())
    standings = {standing["name"]: standing for standing in stored["standings"]}
    bits = {name: row["results"][0]["gate"]["bits_per_byte"] for name, row in standings.items()}
    assert all(row["score"] > 0 for row in standings.values()), standings
    assert 0 < abs(bits[other] - bits["embedded"]) < 0.02  # close, but not the same weights or cache
    unproved = {name for name, call in proof.CALLS.items() if proof.BIAS in call.body and not call.spelled}
    assert limits["embedded-ngram"] - limits["embedded"] == unproved
    assert bits["embedded-ngram"] == pytest.approx(bits["embedded"], rel=1e-3)  # the same model, speculating
    log = (paths.state() / "bench" / "bakeoff" / other / "server.log").read_text(errors="replace")
    assert ("fp8" if other == "embedded-kv8" else "Dense layers") in log
    assert record.read() is None
    assert record.leftovers() == []
    assert next(iter(standings.values()))["score"] == max(row["score"] for row in standings.values())
