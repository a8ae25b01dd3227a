"""Flags, environment variables and the table of baselines."""

import json
import os
from dataclasses import replace

import pytest
from expected import refused

from sparkforge.bench import baselines, context, schema, settings
from sparkforge.bench.settings import BenchSettings
from sparkforge.core.errors import UsageError
from sparkforge.core.process import started_at
from sparkforge.serve import access, record


def configs(endpoint, table, flags=None, environment=None):
    return settings.configs(BenchSettings(flags or {}, environment or {}), table, endpoint)


def test_one_configuration_comes_from_the_competitions_variables(endpoint, table):
    environment = {"ISL": "100", "OSL": "50", "CONC": "8", "TP": "2", "RANDOM_RANGE_RATIO": "1.0"}
    environment["MAX_MODEL_LEN"] = "999"
    (config,) = configs(endpoint, table, environment=environment)
    assert (config.isl, config.osl, config.conc, config.tp, config.max_model_len) == (100, 50, 8, 2, 999)
    assert (config.num_prompts, config.warmups) == (80, 16)
    assert config.random_range_ratio == 0.0  # older benchmark programs used 1.0 for a fixed length
    flags = {"conc": "2", "warmups": "3", "seed": "5"}
    (config,) = configs(endpoint, table, flags, {**environment, "NUM_PROMPTS": "7"})
    assert (config.conc, config.num_prompts) == (2, 7), "flags win over variables"
    assert (config.warmups, config.seed) == (3, 5)


def test_a_shape_by_flags_is_a_batch_of_the_tables_concurrencies(endpoint, table):
    flags, environment = {"isl": "1024", "osl": "1024"}, {"CONC": "64", "NUM_PROMPTS": "7"}
    chosen = configs(endpoint, table, flags, environment)
    assert [(config.conc, config.num_prompts) for config in chosen] == [(4, 40), (8, 80), (16, 160)]
    assert [config.conc for config in configs(endpoint, table, {**flags, "conc": "1,2"})] == [1, 2]


def test_a_setting_without_meaning_is_named(endpoint, table):
    for flags, message in (
        ({"conc": "abc"}, "--conc=abc"), ({"isl": "10", "osl": "10"}, "no concurrencies are known for 10/10"),
        ({"isl": "4000"}, r"4000 \+ 1024 tokens do not fit"),
        ({"random_range_ratio": "nan"}, "RANDOM_RANGE_RATIO=nan"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            configs(endpoint, table, flags)


def test_the_served_model_is_found_by_its_name_repository_or_folder_or_refused(stub):
    for name in ("", "honest-model", "openai/Honest-Model", "/models/honest-model/"):
        assert settings.endpoint(BenchSettings({"url": stub.url + "/v1"}, {"MODEL": name})).model == "honest-model"
    with pytest.raises(UsageError, match="does not serve 'other'"):
        settings.endpoint(BenchSettings({"model": "other", "url": stub.url}, {}))
    with refused("server.reply", "does not answer"):
        settings.endpoint(BenchSettings({"port": "9"}, {}))


@pytest.mark.parametrize(
    "change", [("schema = 1", "schema = 2"), ('date = "2025-12-04"', 'date = "then"'), ("[4, 8]", "[4, 8")]
)
def test_a_malformed_table_or_a_text_that_changed_is_refused(tmp_path, table, change):
    path = tmp_path / "baselines.toml"
    path.write_text(baselines.FILE.read_text().replace(*change))
    with refused("input.table"):
        baselines.load(path)
    with refused("input.baselines", "has changed"):
        table.texts[0].model_copy(update={"sha256": "0" * 64}).read()


def test_a_ratio_needs_a_baseline_of_the_same_shape(make_result, table):
    result = make_result(isl=1024, osl=1024, conc=4)
    assert {ratio.quantity for ratio in result.ratios} == {"median_e2el_ms", "interactivity", "tput_per_gpu"}
    slower = next(ratio for ratio in result.ratios if ratio.quantity == "median_e2el_ms")
    assert slower.ratio > 1
    assert not slower.better
    assert make_result(isl=1000, osl=1024, conc=4).ratios == []
    zero = [figure.model_copy(update={"values": {"tput_per_gpu": 0.0}}) for figure in table.figures]
    assert baselines.compute_ratios(result.metrics, (1024, 1024, 4), zero) == []


def test_a_result_has_the_competitions_keys_beside_ours(bench, config, table, make_result):
    figure = table.competition_figure(1024, 1024, 4)
    m = make_result().metrics
    assert baselines.compare_with_competition(m, figure) == {
        "b200_baseline_nv1126": schema.CompetitionBaseline(b200_median_e2e_1126=2162.0, b200_tput_pergpu_1126=413.779),
        "tput_per_gpu_ratio_vs_b200_1126": pytest.approx(m.tput_per_gpu / 413.779),
        "median_e2e_ratio_vs_b200_1126": pytest.approx(m.e2el_ms.median / 2162.0),
    }
    assert baselines.compare_with_competition(m, table.competition_figure(1024, 1024, 16)) == {}
    ours = figure.model_copy(update={"shape": config.key})
    known = replace(bench, baselines=table.model_copy(update={"figures": [ours]}))
    written = json.loads(known.measure(config, lambda _: None).model_dump_json())
    assert written["b200_baseline_nv1126"] == {"b200_median_e2e_1126": 2162.0, "b200_tput_pergpu_1126": 413.779}
    assert written["tput_per_gpu_ratio_vs_b200_1126"] == pytest.approx(written["metrics"]["tput_per_gpu"] / 413.779)
    assert json.loads(bench.measure(config, lambda _: None).model_dump_json())["b200_baseline_nv1126"] is None


@pytest.fixture
def serving(stub):
    def write(**changes):
        port, pid = int(stub.url.rpartition(":")[2]), os.getpid()
        server = record.Server(pid, started_at(pid), "127.0.0.1", port, "/m", "m", "embedded", "")
        record.write(replace(server, **changes))

    return write


def test_this_checkouts_server_is_the_default_if_its_process_lives(stub, serving):
    serving()
    endpoint = settings.endpoint(BenchSettings({}, {}))
    assert endpoint.url == stub.url
    server = context.describe_server(endpoint)
    assert (server.device, server.version) == ("embedded", "0.0-stub")
    assert server.memory_bytes.keys() == {"rss", "pss"}
    serving(started=1.0)
    assert context.running_server() is None
    assert context.describe_server(settings.endpoint(BenchSettings({"url": stub.url}, {}))).device == ""


def test_a_containers_key_is_sent_only_to_that_container(stub, serving, tmp_path, fake_engine):
    (tmp_path / "key").write_text("kept-secret\n")
    fake_engine.container["Mounts"] = [{"Source": str(tmp_path / "key"), "Destination": access.SECRET}]
    serving(pid=0, started=0.0, container="abc", key_file=str(tmp_path / "key"))
    endpoint = settings.endpoint(BenchSettings({}, {}))
    endpoint.tokenize("x")
    assert stub.bodies[-1][2]["Authorization"] == "Bearer kept-secret"
    assert "kept-secret" not in repr(endpoint)
    serving(pid=0, started=0.0, container="abc", key_file=str(tmp_path / "key"), port=1)
    settings.endpoint(BenchSettings({"url": stub.url}, {})).tokenize("x")
    assert "Authorization" not in stub.bodies[-1][2]


def test_an_invalid_url_is_refused_before_any_request():
    for url in ("http://127.0.0.1:x", "http://127.0.0.1:99999", "http://[", "http://", "ftp://h", "http://a\0b"):
        with pytest.raises(UsageError, match="is not the URL"):
            settings.endpoint(BenchSettings({"url": url}, {}))
