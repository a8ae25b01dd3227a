"""Checks of the model directory."""

from sparkforge.core.errors import InputError
from sparkforge.core.memory import in_gib as gib
from sparkforge.plan import architecture
from validate.checks.finding import MODEL_FIX, CheckList, CheckResult, View, failed, passed

CHECKS = CheckList[View]()


def some(names: list[str]) -> str:
    """Return the first few of many names as text."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


@CHECKS.add(needs=("model",), fix=MODEL_FIX)
def _model_files(view: View) -> CheckResult:
    """Every shard of the index and every file of the tokenizer is present and complete."""
    for fact, problem in (
        ("model.shards_missing", "missing shards"),
        ("model.shards_damaged", "damaged shards"),
        ("model.files_missing", "missing files"),
    ):
        if names := view.names(fact):
            return failed(f"{problem}: {some(names)}")
    return passed(f"all shards whole, {gib(view.number('model.weight_bytes'))}")


@CHECKS.add(needs=("model",), fix="./inv models   # lists the known families")
def _model_format(view: View) -> CheckResult:
    """The checkpoint is of a known family, and its weights have a known format."""
    config = view.table("model.config")
    try:
        model = architecture.parse(config, "config.json")
    except InputError as error:
        return failed(f"{error.what}: {error.why}")
    if config.get("model_type") != view.text("model.model_type"):
        return failed(f"model_type is {view.text('model.model_type')}, config.json says {config.get('model_type')}")
    if lie := model.disagreement(int(view.number("model.weight_bytes"))):
        return failed(lie, "./inv pull gpt-oss-120b --replace   # config.json does not match these files")
    return passed(f"{model.family}, experts in {model.experts_form}, other layers in {model.dense_form}")
