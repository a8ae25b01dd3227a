"""The search for kernel shapes, with a formula instead of a timer, so that no GPU is needed."""

import json
import math

import pytest
import torch

from spark_mxfp4.kernels import search, tuning

WIDTHS = (8, 16, 24, 32, 64, 96, 144, 8)  # tokens of a tile for each shape
H200, UNKNOWN = "NVIDIA H200", tuning.LaidOut(16, 6144, 2048)
DEVICE = torch.device("cuda", 0)


def fake_timer(pairs, shapes):
    """Return a made-up time: shape 3 is best for the first product, 5 for the second, and 2 is good for both."""
    return 100 + {3: 1, 2: 5}.get(shapes[0], 20) + {5: 2, 2: 6}.get(shapes[1], 20)


def choose_rules(sizes=UNKNOWN, timed=fake_timer, until=math.inf, clock=lambda: 0.0):
    return search.choose(sizes, WIDTHS, H200, timed, until, clock)


@pytest.fixture(autouse=True)
def own_results(monkeypatch, search_on, claim_gpu):
    claim_gpu(get_device_name=H200, is_current_stream_capturing=False)
    monkeypatch.setattr(search, "timer", lambda *_: fake_timer)


def tune(sizes=UNKNOWN):
    search.tune(DEVICE, sizes, WIDTHS, lambda *_: pytest.fail("no layer runs here"))


def stored():
    return search.SearchKey(search.precompile.file_name("hopper", "90a"), H200, UNKNOWN).path()


def test_the_best_mixed_pair_wins_and_every_load_has_a_rule():
    rules = choose_rules()
    assert all((rule["gate_up"], rule["down"]) == (3, 5) for rule in rules)
    bounds = [rule.get("pairs") for rule in rules]
    assert bounds[-1] is None
    assert bounds[:-1] == sorted(set(bounds[:-1]))
    assert len(rules) == len(search.loads(H200, UNKNOWN))


@pytest.mark.parametrize("experts", [1, 8, 16, 32, 256, 512])
def test_loads_rise_and_a_bucket_takes_few_timings(experts):
    sizes = tuning.LaidOut(experts, 1024, 1024)
    loads, timings = search.loads(H200, sizes), []
    assert loads == sorted(set(loads))
    assert len(loads) <= 15
    assert loads[-1] <= search.MOST_PAIRS

    def counting(pairs, shapes):
        timings.append((pairs, shapes))
        return 1.0

    choose_rules(sizes, counting)
    assert len(timings) == len(set(timings)) <= 16 * len(loads)


def test_a_pair_that_is_not_clearly_faster_does_not_replace_the_tables():
    load = search.loads(H200, UNKNOWN)[1]
    usual = tuning.default_shapes(H200, load, UNKNOWN)
    rules = choose_rules(timed=lambda _, shapes: 100 if shapes == usual else 99)
    assert (rules[1]["gate_up"], rules[1]["down"]) == usual


@pytest.mark.parametrize("experts", [1, 16, 256])
def test_loads_with_one_launch_are_not_searched(experts):
    sizes = UNKNOWN._replace(experts=experts)
    few = [pairs for pairs in range(1, 4 * experts) if tuning.default_shapes(H200, pairs, sizes) is None]
    assert few
    assert not {*few} & {*search.loads(H200, sizes)}
    tune(sizes)
    assert {tuning.shapes(H200, pairs, sizes) for pairs in few} == {None}


def test_when_time_is_up_the_remaining_loads_keep_the_tables_shapes():
    moments = iter(range(100))
    rules = choose_rules(until=2, clock=lambda: next(moments))
    pairs = [(rule["gate_up"], rule["down"]) for rule in rules]
    assert pairs[:2] == [(3, 5), (3, 5)]
    assert pairs[2:] == [tuning.default_shapes(H200, load, UNKNOWN) for load in search.loads(H200, UNKNOWN)[2:]]


def test_the_cost_model_offers_narrow_tiles_for_few_tokens_and_wide_ones_for_many():
    wide = (*WIDTHS, 8, 8, 8)
    assert {wide[number] for number in search.candidates(2, 16, wide)} >= {8, 16}
    assert 6 not in search.candidates(2, 16, wide)
    assert [WIDTHS[number] for number in search.candidates(16 * 200, 16, WIDTHS)[:3]] == [144, 96, 64]


def test_a_result_is_used_and_kept_and_read_again():
    before = tuning.shapes(H200, 64, UNKNOWN)
    tune()
    assert tuning.shapes(H200, 64, UNKNOWN) == (3, 5) != before
    assert tuning.shapes(H200, 64, UNKNOWN._replace(experts=17)) == before
    kept = json.loads(stored().read_text())
    assert (kept["device"], kept["sizes"]["hidden"]) == (H200, 6144)
    tuning._adopted.clear()
    stored().write_text(stored().read_text().replace('"down": 5', '"down": 6'))
    tune()
    assert tuning.shapes(H200, 64, UNKNOWN) == (3, 6), "it searched again"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"rules": []}', '{"rules": [{"gate_up": 99, "down": 0}]}',
     '{"rules": [{"gate_up": true, "down": 0}]}',
     '{"rules": [{"pairs": 9, "gate_up": 0, "down": 0}]}', '{"rules": 3}', '{"rules": [3]}', "\x00\xff"],
)  # fmt: skip
def test_a_damaged_file_is_searched_again_and_replaced(text):
    stored().parent.mkdir(parents=True)
    stored().write_text(text, encoding="latin-1")
    tune()
    assert tuning.shapes(H200, 64, UNKNOWN) == (3, 5)
    assert search.read(stored(), len(WIDTHS)) == tuning._adopted[H200, UNKNOWN]
    assert len(list(stored().parent.iterdir())) == 1


def test_each_kernel_version_device_and_size_has_its_own_file():
    key = search.SearchKey("a", H200, UNKNOWN)
    others = (key._replace(kernels="b"), key._replace(device="NVIDIA H100 80GB HBM3"))
    others = (*others, key._replace(sizes=UNKNOWN._replace(hidden=64)))
    assert len({key.path(), *(other.path() for other in others)}) == 4


def test_an_unwritable_folder_only_means_another_search_at_the_next_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tune()
    assert tuning.shapes(H200, 64, UNKNOWN) == (3, 5)


@pytest.mark.parametrize("reason", ["off", "unset", "named", "captured", "out of memory"])
def test_without_a_search_the_tables_shapes_stay(reason, monkeypatch, claim_gpu):
    sizes = tuning.LaidOut(128, 2880, 2880) if reason == "named" else UNKNOWN
    if reason == "off":
        monkeypatch.setenv(search.SEARCH_VARIABLE, "off")
    if reason == "unset":
        monkeypatch.delenv(search.SEARCH_VARIABLE)
    if reason == "captured":
        claim_gpu(is_current_stream_capturing=True)
    if reason == "out of memory":

        def full(*_):
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(search, "timer", lambda *_: full)
    tune(sizes)
    assert tuning._adopted == {}
    assert tuning.shapes(H200, 64, sizes) == tuning.default_shapes(H200, 64, sizes)


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(search.SEARCH_VARIABLE, "yes")
    with pytest.raises(ValueError, match="SPARK_MXFP4_SEARCH is 'yes'"):
        tune()
