import re

from sparkforge.core import errors
from sparkforge.core.files import read_toml
from sparkforge.core.paths import ROOT


def sources():
    for package in ("sparkforge", "validate"):
        yield from (ROOT / package).rglob("*.py")


def test_every_family_has_an_exit_code_of_its_own():
    codes = [family.exit_code for family in errors.SparkforgeError.__subclasses__()]
    assert len(codes) == len(set(codes))
    assert all(0 < code < 126 for code in codes)  # shells use 126 and above


def test_every_raised_code_is_in_the_table_and_has_the_right_family():
    families = {family.__name__: family.family for family in errors.SparkforgeError.__subclasses__()}
    raised, codes = set(), read_toml(ROOT / "lab/errors.toml")
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for name, body in re.findall(r"\b(\w+Error)\(((?:[^()]|\([^()]*\))*)\)", text):
            for code in re.findall(r'code="([a-z.-]+)"', body) if name in families else ():
                assert code in codes, (path, code)
                assert code.partition(".")[0] == families[name], (path, code)
                raised.add(code)
    assert len(raised) > 30
