"""`lab.weigh` counts lines, words and commands; `lab.names` finds names of model families in code."""

from lab import names, weigh

LONG = "def _once(a, b, c, d, e, f, g):\n    return a\n\n\ndef twice(self, a, b, c, d, e, f):\n    return _once(*a)\n"


def test_lines_words_commands_and_functions_are_counted_by_house(tmp_path):
    files = {
        "sparkforge/a.py": LONG, "validate/b.py": "", "spark_mxfp4/k.cuh": "// a kernel\n",
        "spark_mxfp4/tests/test_k.py": "assert True\n", "lab/c.py": "x = 1\n", "lab/tests/test_c.py": "x = 1\ny = 2\n",
        "docs/page.md": "Three short words.\n", "lab/README.md": "not of the documentation\n", ".venv/d.py": "x = 1\n",
        "tasks.py": "class namespace:\n    to_contexts = staticmethod(lambda: [1, 2])\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    figures = weigh.weigh(tmp_path)
    assert [figures[f"lines of the {name}"] for name in weigh.HOUSES] == ["6", "1", "1", "3"]
    assert (figures["words of the documentation"], figures["commands"], figures["modules of the product"]) == (
        "3", "2", "2",
    )  # fmt: skip
    assert figures["private functions of the product called once"] == "1"
    assert figures["functions of the product with more than 6 parameters"] == "1"


def test_no_code_names_a_family():
    assert names.main() == 0


def test_strings_that_name_a_family_are_found_but_sentences_are_not(tmp_path):
    file = tmp_path / "code.py"
    file.write_text('"""qwen3_moe"""\nX = "the family qwen3_moe has experts"\nY = "is-qwen3_moe-2"\n')
    assert [*names.problems([file])] == []
    file.write_text('def f():\n    return kind == "qwen3_moe"\n')
    assert [*names.problems([file])] == [f"{file}: 'qwen3_moe' names a family of models; a row of its table says it"]
