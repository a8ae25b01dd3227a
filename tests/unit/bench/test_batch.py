"""Batches: a failure does not stop the batch, a kill loses no result, another server starts a new batch."""

import json

import pytest
from expected import refused

from sparkforge.bench import compare, runs, schema
from sparkforge.core.errors import UsageError


@pytest.fixture
def flags(stub, tmp_path):
    shape = {"isl": "24", "osl": "8", "conc": "1,2,4", "num_prompts": "4", "warmups": "0"}
    limits = {"silence": "2", "limit": "5"}
    return {"url": stub.url, "text": "persuasion-24", "output": str(tmp_path / "out"), **shape, **limits}


def batches(flags):
    return sorted(runs.output_folder(flags["output"]).glob("batch_*"))


def test_a_failed_configuration_does_not_stop_the_others(stub, flags):
    echoes = 18  # chunks of 512 of the text's 9,000 bytes; for the stub each byte is a token
    stub.status, stub.fail_from = 500, echoes + 4 + 1  # within the second configuration
    with refused("benchmark.batch", "2 of 3") as caught:
        runs.run_benchmark(flags)
    assert "the same command repeats the failed ones" in caught.value.fix
    summary = (batches(flags)[0] / "summary.txt").read_text()
    for text in ("✓ CONC=1: PASSED", "✗ CONC=2: FAILED", "HTTP 500", "Failed: 2"):
        assert text in summary
    stub.status, stub.fail_from = 200, 10**9
    stub.bodies.clear()
    (batches(flags)[0] / "result_isl24_osl8_conc4.json").write_text('{"format": "sparkforge-bench/1", ')  # torn
    runs.run_benchmark(flags)
    (folder,) = batches(flags)
    assert sum(bool(body.get("stream")) for _, body, _ in stub.bodies) == 4 * 2  # the first is kept, not measured again
    assert json.loads((folder / "batch.json").read_text())["complete"]
    assert folder.name.startswith("batch_isl24_osl8_")
    results = {f"result_isl24_osl8_conc{conc}.json" for conc in (1, 2, 4)}
    assert {path.name for path in folder.iterdir()} == {"batch.json", "summary.txt", *results}
    assert (folder / "summary.txt").read_text().splitlines()[-2:] == ["Passed: 3", "Failed: 0"]
    assert schema.read(folder / "result_isl24_osl8_conc4.json").metrics.completed == 4
    stub.logprob = -9.0
    stub.bodies.clear()
    with refused("benchmark.gate"):
        runs.run_benchmark(flags)
    assert not any(body.get("stream") for _, body, _ in stub.bodies), "a failed gate times nothing"


def unfinished(bench, config, flags, **changes):
    wanted = {**runs.batch_plan(bench, [config]), **changes}
    return runs.batch_folder(runs.output_folder(flags["output"]), wanted, fresh=False)


def test_only_an_identical_batch_is_continued(bench, config, flags):
    first = unfinished(bench, config, flags)
    assert unfinished(bench, config, flags) == first
    assert unfinished(bench, config, flags, server_version="another") != first
    assert unfinished(bench, config.model_copy(update={"seed": 9}), flags) != first
    runs.finish(first)
    assert unfinished(bench, config, flags) != first


def test_the_gate_prints_the_row_of_its_figures(flags, capsys):
    runs.run_gate({**flags, "record": True})
    assert '[[gates]]\nmodel = "honest-model"' in capsys.readouterr().out


# Comparison and regression


def test_a_faster_run_is_detected_but_equal_runs_are_not(make_result):
    before = [make_result(seed=seed) for seed in range(3)]
    faster = compare.differences(before, [make_result(seed=seed, speed=1.2) for seed in range(3, 6)])
    assert {d.quantity: d.change for d in faster} == dict.fromkeys(compare.QUANTITIES, "better")
    assert all(d.low < d.ratio < d.high for d in faster)
    same = [make_result(seed=seed) for seed in range(3, 6)]
    for sides in ((before, same), ([make_result(seed=1)], [make_result(seed=1, speed=1.015)])):  # one run each
        assert {d.change for d in compare.differences(*sides)} == {"no difference seen"}


def test_compare_reads_several_files_a_side_and_incomparable_results_are_refused(make_result, tmp_path, capsys):
    for other in ({"conc": 8}, {"client": {"name": "x", "version": ""}}, {"passed": False}, {"requests": []}):
        with pytest.raises(UsageError, match="cannot be compared"):
            compare.differences([make_result()], [make_result(**other)])
    for name, speed in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        schema.write(tmp_path / f"{name}.json", make_result(speed=speed))
    compare.print_comparison(f"{tmp_path}/a.json,{tmp_path}/b.json", f"{tmp_path}/c.json")
    assert "2.000" in capsys.readouterr().err
    with pytest.raises(UsageError):
        compare.print_comparison("", f"{tmp_path}/c.json")


def test_invalid_names_of_results_are_refused(flags):
    for name in ("accuracy", "Accuracy", "a\nb", "\udcff", "a\u202eb", "x" * 300, "a/b", "../mine"):
        with pytest.raises(UsageError, match="RESULT_FILENAME") as caught:
            runs.check({**flags, "result_filename": name}, "m", 4096)
        assert str(caught.value).isprintable()
