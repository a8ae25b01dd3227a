"""On a CPU products.py finds no errors; it shows those of MAX on Hopper."""


def test_products_on_a_cpu_are_right_and_stay_in_their_result(lines):
    results = lines("products.py", "--device", "cpu")
    assert {(result["columns"], result["result"]) for result in results} >= {(4, "bfloat16"), (512, "float32")}
    assert {result["rows"] for result in results} >= {1, 127, 128, 129}
    for result in results:
        assert (result["wrong"], result["overwritten"], result["factors_changed"]) == (0, 0, 0), result
