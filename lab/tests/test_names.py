"""The program that looks for families of models in code."""

from lab import names


def test_no_code_names_a_family():
    assert names.main() == 0


def test_a_string_that_names_one_is_found_and_a_sentence_is_not(tmp_path):
    file = tmp_path / "code.py"
    file.write_text('"""qwen3_moe"""\nX = "the family qwen3_moe has experts"\nY = "is-qwen3_moe-2"\n')
    assert [*names.problems([file])] == []
    file.write_text('def f():\n    return kind == "qwen3_moe"\n')
    assert [*names.problems([file])] == [f"{file}: 'qwen3_moe' names a family of models; a row of its table says it"]
