"""vLLM's arguments: what a flag's value is in a list of them."""

from sparkforge.core.vllm_flags import flag_value


def test_the_last_occurrence_wins_and_underscores_in_a_flag_are_hyphens():
    assert flag_value(("--port=1", "--host", "::1", "--port", "2"), "--port") == "2"
    assert flag_value(("--port=",), "--port") == ""
    assert flag_value(("--portal", "9000"), "--port") is None
    assert flag_value(("--host", "::1"), "--port") is None
    assert flag_value(["--kv_cache_dtype", "fp8_e4m3"], "--kv-cache-dtype") == "fp8_e4m3"
    assert flag_value(["--served_model_name=a_b=c"], "--served-model-name") == "a_b=c"
    assert flag_value(["-tp", "2"], "--tensor-parallel-size") == "2"
    assert flag_value(["-tp=2", "-qspark-mxfp4", "-n=2"], "--quantization") == "spark-mxfp4"
    assert flag_value(["-1", "-", "-n4"], "--nnodes") == "4"
