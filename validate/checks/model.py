"""Checks of the kernels' results (of the experts, and of every part of two layers), and of the model directory."""

from sparkforge.core.errors import InputError
from sparkforge.core.memory import in_gib as gib
from sparkforge.plan import architecture
from validate.checks.finding import MODEL_FIX, CheckList, CheckResult, View, failed, passed, warned
from validate.facts.child import EAGER, NOT_COMPILED, OTHER

BUILD = "./inv build.kernels   # then validate again"
NOT_RUN = {
    NOT_COMPILED: ("FlashInfer's MoE module is not compiled yet; the server's first start compiles it", BUILD),
    OTHER: ("the check's layer has other experts than this model's family", "./inv bench.acc   # judges its answers"),
}

# Device → the reason why no CUDA graph was captured.
NO_GRAPH = {"cpu": "no GPU, so no CUDA graph", EAGER: "the kernel does not support CUDA graphs"}

CHECKS = CheckList[View]()


def some(names: list[str]) -> str:
    """Return the first few of many names as text."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


@CHECKS.add(needs=("numerics",), fix="./inv logs   # choose another --moe-backend; report this")
def _numerics(view: View) -> CheckResult:
    """A small MXFP4 MoE layer gives the reference's numbers with the server's kernel."""
    if not_run := NOT_RUN.get(view.text("numerics.state")):
        return warned(f"not run: {not_run[0]}", not_run[1])
    kernel, difference = view.text("numerics.kernel"), view.number("numerics.difference")
    allowed = view.number("numerics.tolerance")
    evidence = f"{kernel} differs from the reference by {difference:.2%}, {allowed:.0%} is rounding"
    if difference > allowed:
        return failed(evidence)
    if view.is_none("numerics.graph_difference") and (reason := NO_GRAPH.get(view.text("numerics.device"))):
        return passed(f"{evidence}; {reason}")
    if (replayed := view.number("numerics.graph_difference")) > 0:
        evidence = f"{evidence}, but a CUDA graph's replay differs from it by {replayed:g}"
        return failed(evidence, "./inv up -- --enforce-eager")
    return passed(f"{evidence}; a CUDA graph replays it bit for bit")


# Largest relative RMS difference that rounding explains, by a part's format. Measured on the CPU's backends: bfloat16
# 0.17 %, MXFP8 3.3 %, MXFP4 13.4 %; an FP8 cache 9.6 %, because the softmax amplifies the error of a key. FP8 is
# calculated to equal MXFP8. A window that is off by one gives 4 %, missing sinks 20 %.
TOLERANCES = {"bf16": 0.01, "fp8": 0.06, "mxfp8": 0.06, "mxfp4": 0.20}
FP8_CACHE = 0.15


@CHECKS.add(needs=("layers", "numerics"), fix="./inv logs   # choose another backend for it, and report this")
def _layers(view: View) -> CheckResult:
    """Each part of two gpt-oss layers gives the reference's numbers in the classes that vLLM selects here."""
    if not_run := NOT_RUN.get(view.text("layers.state")):
        return warned(f"not run: {not_run[0]}", not_run[1])
    bf16 = TOLERANCES["bf16"]
    linear, head = (TOLERANCES.get(view.text(f"layers.{name}"), bf16) for name in ("linear", "head"))
    limits = {"qkv_proj": linear, "o_proj": linear, "lm_head": head, "experts": view.number("numerics.tolerance")}
    limits["attention"] = FP8_CACHE if view.text("layers.cache") == "fp8" else bf16
    differences = view.numbers("layers.differences")
    wrong = []
    for part, difference in differences.items():
        allowed = limits.get(part.partition(" ")[0], bf16)
        if not difference <= allowed:  # NaN too
            wrong.append(f"{part} differs from the reference by {difference:.2%}, {allowed:.0%} is rounding")
    if wrong:
        return failed("; ".join(wrong))
    worst = max(differences, key=lambda part: differences[part])
    return passed(f"of {len(differences)} parts {worst} differs most from the reference, by {differences[worst]:.2%}")


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
