"""Results as llama-benchy writes them, and the files of a Spark Arena entry."""

import csv
import io
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from sparkforge import pins
from sparkforge.bench import exchange, schema
from sparkforge.core.errors import InputError, UsageError

METRIC = {"type": ["object", "null"], "required": ["mean", "std", "values"]}
# What llama-benchy 0.3.0's schemas/benchmark_report_schema.json requires.
REPORT = {
    "type": "object",
    "required": [
        *("version", "timestamp", "latency_mode", "latency_ms", "model", "prefix_caching_enabled", "max_concurrency"),
        "benchmarks",
    ],
    "properties": {
        "timestamp": {"pattern": r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ$"},
        "latency_ms": {"type": "number"},
        "prefix_caching_enabled": {"type": "boolean"},
        "max_concurrency": {"type": "integer"},
        "benchmarks": {
            "items": {
                "required": ["concurrency", "context_size", "prompt_size", "response_size", "is_context_prefill_phase"],
                "properties": {
                    **{
                        f"{phase}{kind}throughput": METRIC for phase in ("pp_", "tg_", "peak_") for kind in ("", "req_")
                    },
                    **dict.fromkeys(("ttfr", "est_ppt", "e2e_ttft"), METRIC),
                },
            }
        },
    },
}


@pytest.fixture
def save(tmp_path, make_result):
    """Return a function that saves a result of these requests (start, ttft, e2el in ms; 10 tokens in, 5 out)."""

    def save(name, conc, *times, model="gpt-oss-120b", **changes):
        requests = [
            {"start_ms": start, "ttft_ms": ttft, "tpot_ms": (end - ttft) / 4, "e2el_ms": end, "prompt_tokens": 10,
             "output_tokens": 5}
            for start, ttft, end in times
        ]  # fmt: skip
        result = make_result(conc=conc, isl=10, osl=5, count=len(times), requests=requests, team_model=model, **changes)
        schema.write(tmp_path / name, result)
        return str(tmp_path / name)

    return save


def export(names, form, output, profile="safe"):
    exchange.main(names, form, str(output), profile)
    return Path(output)


def test_the_report_is_llama_benchys_with_its_formulas(save, tmp_path):
    single = save("a.json", 1, (0, 100, 500), (500, 200, 1000))
    first, second = (save(f"{n}.json", 2, (0, 100, 500), (0, 200, 700)) for n in "bc")
    path = export([single, first, second], "llama-benchy", tmp_path / "out.json")
    report = json.loads(path.read_text())
    jsonschema.validate(report, REPORT)
    assert (report["model"], report["max_concurrency"], report["latency_mode"]) == ("gpt-oss-120b", 2, "none")
    assert report["version"].startswith("sparkforge ")
    alone, together = report["benchmarks"]
    # pp: tokens / time to the first response; tg: (tokens - 1) / time after it; std of the population.
    assert alone["pp_throughput"] == {"mean": 75.0, "std": 25.0, "values": [100.0, 50.0]}
    assert alone["tg_throughput"]["values"] == [10.0, 5.0]
    assert alone["tg_req_throughput"] == alone["tg_throughput"]
    assert alone["ttfr"] == {"mean": 150.0, "std": 50.0, "values": [100.0, 200.0]}
    # Two rounds of two: all prompts over the last first token; the tokens behind each first one over the answers' time.
    assert together["pp_throughput"]["values"] == [100.0, 100.0]
    assert together["tg_throughput"]["values"] == pytest.approx([8 / 0.6] * 2)
    assert len(together["pp_req_throughput"]["values"]) == 4
    assert together["peak_throughput"] is None


def test_a_load_of_several_rounds_has_no_speed_of_all_together(save, tmp_path):
    name = save("a.json", 2, (0, 100, 500), (0, 200, 700), (500, 100, 500))
    report = json.loads(export([name], "llama-benchy", tmp_path / "out.json").read_text())
    (run,) = report["benchmarks"]
    assert run["pp_throughput"] is run["tg_throughput"] is None
    assert len(run["tg_req_throughput"]["values"]) == 3


def test_the_csv_has_llama_benchys_columns_and_rows(save, tmp_path):
    names = [save("a.json", 1, (0, 100, 500)), save("b.json", 2, (0, 100, 500), (0, 200, 700))]
    path = export(names, "llama-benchy-csv", tmp_path / "out.csv")
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    means = ("t_s", "t_s_req", "peak_ts", "peak_ts_req", "ttfr", "est_ppt", "e2e_ttft")
    assert list(rows[0]) == ["model", "test_name", *(f"{name}_{part}" for name in means for part in ("mean", "std"))]
    assert [row["test_name"] for row in rows] == ["pp10 (c1)", "tg5 (c1)", "pp10 (c2)", "tg5 (c2)"]
    assert (rows[0]["t_s_mean"], rows[0]["ttfr_mean"], rows[0]["peak_ts_mean"]) == ("100.0", "100.0", "")
    assert (rows[1]["t_s_mean"], rows[1]["ttfr_mean"]) == ("10.0", "")


def test_the_markdown_has_fewer_columns_for_one_request_at_a_time(save, tmp_path):
    name = save("a.json", 1, (0, 100, 500), (500, 200, 1000))
    lines = export([name], "llama-benchy-md", tmp_path / "out.md").read_text().splitlines()
    assert lines[0] == "| model | test | t/s | peak t/s | ttfr (ms) | est_ppt (ms) | e2e_ttft (ms) |"
    assert lines[1].count(":") == 7
    assert lines[2].startswith("| gpt-oss-120b | pp10 | 75.00 ± 25.00 |  | 150.00 ± 50.00 |")
    several = [name, save("b.json", 2, (0, 100, 500), (0, 200, 700))]
    header = export(several, "llama-benchy-md", tmp_path / "two.md").read_text().splitlines()[0]
    assert header == (
        "| model | test | t/s (total) | t/s (req) | peak t/s | peak t/s (req) | ttfr (ms) | est_ppt (ms) "
        "| e2e_ttft (ms) |"
    )


def test_a_batch_is_named_by_its_folder(save, tmp_path, capsys):
    save("result_a.json", 1, (0, 100, 500))
    exchange.main([str(tmp_path)], "llama-benchy", "", "safe")
    path = Path(capsys.readouterr().out.strip())
    assert json.loads(path.read_text())["benchmarks"][0]["concurrency"] == 1


VLLM = {name: stack.components["vllm"].version for name, stack in pins.load().stacks.items() if name != "embedded"}
DEFAULT = VLLM[pins.load().default]


def served(version=DEFAULT, **changes):
    return {"model": "gpt-oss-120b", "device": "docker", "version": version, **changes}


@pytest.mark.parametrize("stack", VLLM)
def test_an_entry_names_the_image_of_the_stack_that_served(save, tmp_path, stack):
    name = save("a.json", 1, (0, 100, 500), server=served(f"{VLLM[stack]}+sparkforge.4"))
    folder = export([name], "spark-arena", tmp_path / "entry")
    assert json.loads((folder / "metadata.json").read_text())["recipe"]["container"] == f"sparkforge/vllm:{stack}"
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["container"] == f"sparkforge/vllm:{stack}"


def test_results_of_two_releases_of_vllm_make_no_entry(save, tmp_path):
    versions = sorted(VLLM.values())[:2]
    names = [save(f"{version}.json", 1, (0, 100, 500), server=served(version)) for version in versions]
    with pytest.raises(InputError) as caught:
        export(names, "spark-arena", tmp_path / "entry")
    assert f"their servers ran {', '.join(versions)}, and" in caught.value.why


def test_an_entry_has_the_three_files_of_sparkrun(save, tmp_path, capsys):
    name = save("a.json", 1, (0, 100, 500), server=served())
    folder = export([name], "spark-arena", tmp_path / "entry", "fast")
    assert sorted(path.name for path in folder.iterdir()) == ["benchmark.csv", "metadata.json", "recipe.yaml"]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (recipe["model"], recipe["runtime"], recipe["max_nodes"]) == ("openai/gpt-oss-120b", "vllm", 1)
    assert recipe["defaults"]["max_num_seqs"] == "64"  # of the profile that was named
    assert "--max-num-seqs '{max_num_seqs}' \\\n" in recipe["command"]
    placeholders = set(re.findall(r"{(\w+)}", recipe["command"]))
    assert placeholders == {"model", *recipe["defaults"]}
    metadata = json.loads((folder / "metadata.json").read_text())
    assert set(metadata) == {"recipe", "timing", "cluster", "benchmark", "model", "runtime_info", "sparkforge"}
    assert metadata["recipe"]["hf_model"] == "openai/gpt-oss-120b"
    assert metadata["benchmark"]["args"] == {"pp": [10], "tg": [5], "depth": [0], "concurrency": [1]}
    assert metadata["timing"]["duration"] == 1.0
    assert "nothing was sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"device": "embedded"}, "without a GPU"),
        ({"model": "tiny-gpt-oss"}, "pins no openai/tiny-gpt-oss"),
        ({"version": "0.31.0"}, "their servers ran 0.31.0"),
        ({"version": ""}, "their servers ran an unknown vLLM"),
        ({"conc": 2}, "10/5 c2 has more requests than run at once"),
    ],
)
def test_what_makes_no_entry_is_refused_and_nothing_is_written(save, tmp_path, values, why):
    model = values.get("model", "gpt-oss-120b")
    server = served(**{key: value for key, value in {"model": model, **values}.items() if key != "conc"})
    times = [(0, 100, 500)] * 3
    name = save("a.json", values.get("conc", 1), *times, model=model, server=server)
    with pytest.raises(InputError) as caught:
        export([name], "spark-arena", tmp_path / "entry")
    assert why in caught.value.why
    assert not (tmp_path / "entry").exists()


def test_what_cannot_be_exported_is_refused(save, make_result, tmp_path):
    good = save("a.json", 1, (0, 100, 500))
    failed = make_result(passed=False, checks=[{"name": "x", "ok": False, "told": "the server died"}])
    schema.write(tmp_path / "failed.json", failed)
    with pytest.raises(InputError, match="the server died"):
        exchange.main([str(tmp_path / "failed.json")], "llama-benchy", "", "safe")
    other = save("b.json", 1, (0, 100, 500), model="gpt-oss-20b")
    with pytest.raises(InputError, match="do not belong together"):
        exchange.main([good, other], "llama-benchy", "", "safe")
    with pytest.raises(UsageError, match="no form 'xml'"):
        exchange.main([good], "xml", "", "safe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="there is no result"):
        exchange.main([str(tmp_path / "empty")], "llama-benchy", "", "safe")
    with pytest.raises(UsageError, match="is a folder"):
        exchange.main([good], "llama-benchy", str(tmp_path), "safe")
