"""vLLM's arguments: what a flag's value is in a list of them."""

import pytest

from sparkforge.core.vllm_flags import flag_value


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((), None),
        (("--host", "::1"), None),
        (("--port", "9000"), "9000"),
        (("--port=9000",), "9000"),
        (("--port=",), ""),
        (("--port=1", "--host", "::1", "--port", "2"), "2"),
        (("--port", "1", "--port=2"), "2"),
        (("--port",), None),
        (("--portal", "9000"), None),
        (("9000", "port"), None),
    ],
)
def test_the_last_occurrence_wins(arguments: tuple[str, ...], value: str | None) -> None:
    assert flag_value(arguments, "--port") == value


def test_underscores_in_a_flag_are_hyphens_and_values_keep_theirs() -> None:
    assert flag_value(["--kv_cache_dtype", "fp8_e4m3"], "--kv-cache-dtype") == "fp8_e4m3"
    assert flag_value(["--served_model_name=a_b=c"], "--served-model-name") == "a_b=c"
