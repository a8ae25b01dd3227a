"""Programs in MAX's Python: what our architecture refuses, with the reason and a fix, and faults of MAX itself."""

import pytest

REFUSED = {
    "experts in bfloat16": "the checkpoint's experts are not MXFP4",
    "attention without biases": "the checkpoint's attention has no biases",
    "two devices": "2 devices were given",
    "two sequences": "batches of 2 sequences were asked for",
    "a CPU for MAX's own experts": "MAX's own experts have no CPU kernels",
    "another format": "quantization_format=fp8 is unknown",
}


@pytest.fixture(scope="module")
def messages(lines):
    return lines("refused.py")[-1]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_a_reason_and_a_fix(messages, case):
    what, why, remedy = messages[case].split(" · ")
    assert what == REFUSED[case]
    assert why
    assert remedy.startswith(("set ", "give "))


def test_supported_models_give_no_message(messages):
    taken = ("as gpt-oss has it", "one device", "two devices for MAX's own experts")
    assert not "".join(messages[case] for case in taken)


def test_the_variable_replaces_the_format_of_the_configuration(messages):
    assert messages["reserved"] == [6, 22, 6, 22]  # GiB: MAX's own plan has room for a layer's experts in bfloat16


def test_on_a_cpu_products_are_right_and_stay_in_their_result(lines):
    """products.py shows errors of MAX on Hopper."""
    results = lines("products.py", "--device", "cpu")
    assert {(result["columns"], result["result"]) for result in results} >= {(4, "bfloat16"), (512, "float32")}
    assert {result["rows"] for result in results} >= {1, 127, 128, 129}
    for result in results:
        assert (result["wrong"], result["overwritten"], result["factors_changed"]) == (0, 0, 0), result


def test_max_counts_a_sink_once_for_each_run_of_128_keys(lines):
    """Our architecture corrects this fault; when MAX corrects it, this test fails."""
    results = lines("sinks.py")
    assert {result["keys"] for result in results} >= {128, 129, 257}
    for result in results:
        assert round(result["counted"], 2) == -(-result["keys"] // 128)
