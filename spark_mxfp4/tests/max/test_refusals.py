"""What the architecture for MAX refuses, each with a reason and a way out."""

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
def test_it_says_what_it_refuses_and_what_helps(messages, case):
    what, why, remedy = messages[case].split(" · ")
    assert what == REFUSED[case]
    assert why
    assert remedy.startswith(("set ", "give "))


def test_nothing_is_said_to_what_it_takes(messages):
    taken = ("as gpt-oss has it", "one device", "two devices for MAX's own experts")
    assert not "".join(messages[case] for case in taken)


def test_the_format_is_the_configurations_and_the_variable_replaces_it(messages):
    assert messages["reserved"] == [6, 22, 6, 22]  # GiB: MAX's own plan has room for a layer's experts in bfloat16
