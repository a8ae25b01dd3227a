"""The computed tables and sentences of docs/performance.md are what the code computes."""

from lab import roofline_page
from sparkforge.models import recipes as models
from sparkforge.plan import devices, roofline, speed
from sparkforge.plan.architecture import DenseFormat, parse
from sparkforge.plan.budget import Workload


def test_the_page_has_what_the_code_computes():
    text = roofline_page.PAGE.read_text()
    assert roofline_page.replaced(text) == text, "python -m lab.roofline_page"
    assert text.count(roofline_page.BEGIN) == 1


def test_what_the_page_says_in_words_is_what_the_code_computes():
    model, spark = parse(models.load()["gpt-oss-120b"].config, "t"), devices.named("spark")
    text = " ".join(roofline_page.PAGE.read_text().split())
    alone = roofline.decode(model, 1, Workload(roofline_page.CONTEXT))
    wide = sum(part.bytes for part in model.parts() if part.name in {"attention qkv", "attention o", "lm_head"})
    assert f"at most {spark.bytes_a_second / alone.bytes:.0f} tokens/s" in text
    assert f"{wide / alone.bytes:.0%}".replace("%", " % of the bytes of a token") in text
    others = [
        speed.ceiling(model, spark, 1, Workload(roofline_page.CONTEXT, kv=kv, dense=DenseFormat(form, form)))
        for form, kv in (("q8_0", "bf16"), ("mxfp4", "fp8"))
    ]
    assert f"the bound is {others[0]:.0f} to {others[1]:.0f}" in text
