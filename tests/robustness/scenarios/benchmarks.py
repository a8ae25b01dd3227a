"""A batch of benchmarks that continues after a kill: results, summary, report."""

import fcntl
import json
import os
from contextlib import contextmanager
from types import SimpleNamespace

from robustness.scenario import Scenario, write
from sparkforge.bench import runs, schema
from sparkforge.bench.schema import Result

SPREAD = {"mean": 1.0, "median": 1.0, "p99": 2.0}
PLAN = {"configs": [{"isl": 8, "osl": 8}], "server_version": "1", "client": {}}


def result(conc):
    config = {"model": "m", "url": "http://127.0.0.1:8000", "tp": 1, "isl": 8, "osl": 8, "conc": conc,
              "max_model_len": 16, "random_range_ratio": 0.0, "num_prompts": 2, "warmups": 0}  # fmt: skip
    metrics = {"completed": 2, "failed": 0, "duration_s": 1.0, "total_input_tokens": 16, "total_output_tokens": 16,
               "output_throughput": 16.0, "total_token_throughput": 32.0, "tput_per_gpu": 32.0,
               "output_tput_per_gpu": 16.0, "interactivity": 10.0, "ttft_ms": SPREAD, "tpot_ms": SPREAD,
               "itl_ms": SPREAD, "e2el_ms": SPREAD}  # fmt: skip
    gate = {"passed": True, "checks": [], "text": "t", "chunked_by": "tokens", "bits_per_byte": 2.0,
            "byte_perplexity": 4.0, "word_perplexity": 9.0, "tokens": 9, "seconds": 1.0, "sanity_only": False,
            "source": "a test"}  # fmt: skip
    value = {"passed": True, "config": config, "gate": gate, "checks": [], "metrics": metrics,
             "client": {"name": "sparkforge", "version": "0"}, "server": {"model": "m"}, "seconds": 1.0}  # fmt: skip
    return Result.model_validate(value)


CONFIGS = [result(conc).config for conc in (1, 2)]


def _measure(config, _progress):
    return result(config.conc)


BENCH = SimpleNamespace(measure=_measure)


def _prepare(work):
    write(work / "out/mine.json", "{}")
    folder = runs.batch_folder(work / "out", PLAN, fresh=True)
    folder.rename(_place(work))


def _place(work):
    return work / "out/batch_isl8_osl8_20261121_000000"


@contextmanager
def _alone(work):
    """Keep other racers from completing the batch between the two reads of its plan; they would begin a second one."""
    handle = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _act(work):
    with _alone(work):
        if b'"complete": true' in (_place(work) / runs.PLAN).read_bytes():
            return
        folder = runs.batch_folder(work / "out", PLAN, fresh=False)
    runs.run_all(BENCH, {folder / f"{config.name}.json": config for config in CONFIGS}, is_batch=True)
    with _alone(work):
        runs.finish(folder)


def _judge(work):
    """Every result can be read, and a complete batch has all results."""
    folder = _place(work)
    for path in folder.glob("result_*.json"):
        assert schema.read(path).passed
    if json.loads((folder / runs.PLAN).read_bytes())["complete"]:
        assert len(list(folder.glob("result_*.json"))) == len(CONFIGS)


SCENARIOS = [Scenario("benchmarks", _prepare, _act, _judge, cost=2.0)]
