"""Checks of the server's arguments, except for those about memory and kernels."""

import re
from collections.abc import Sequence
from pathlib import Path

from sparkforge.core import tables
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import SPECULATION, flag_value, meant
from sparkforge.plan import families
from validate.checks import serving
from validate.checks.finding import CheckList, CheckResult, Status, View, judged, passed

CHECKS = CheckList[View]()


class ArgumentRule(Record):
    """A problem with an argument, and its fix; `values` is a pattern for the beginning of the affected values."""

    flags: tuple[str, ...]
    status: Status
    why: str
    fix: str
    values: str = ""


class ArgumentTable(Record):
    """The whole of `arguments.toml`; `replacements`: a variable in older guides for the Spark → the flag to use now."""

    rule: tuple[ArgumentRule, ...]
    replacements: dict[str, str]


TABLE = tables.load(Path(__file__).with_suffix(".toml"), ArgumentTable)
RULES = TABLE.rule
UNQUANTIZED = ("auto", "float16", "bfloat16")  # of --kv-cache-dtype
PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
PARSERS = ("--tool-call-parser", "--reasoning-parser")
FLAGS = sorted({flag for rule in RULES for flag in rule.flags} | {*PARALLEL, *PARSERS})


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the value of each of FLAGS that is set, by flag; `--speculative-config.model` and abbreviations count."""
    values: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        flag = SPECULATION if name == "-sc" else meant(name.partition(".")[0], FLAGS)
        following = next(iter(arguments[index + 1 : index + 2]), "")
        if flag:
            values[flag] = inline if equals else "" if following.startswith("-") else following
    return values


@CHECKS.add(needs=("serve", "model"), fix="./inv up --help   # leave the argument out")
def _serve_arguments(view: View) -> CheckResult:
    """No argument requests a feature that gpt-oss or a Spark lacks, or that was not tested there."""
    arguments, model = view.names("serve.args"), serving.architecture(view)
    values = _values(arguments)
    problems = [
        (rule.status, f"{flag}{f' {values[flag]}' if values[flag] else ''}: {rule.why}", rule.fix)
        for rule in RULES
        for flag in rule.flags
        if flag in values and re.match(rule.values, values[flag])
    ]
    chat = families.load()[model.family].chat
    for flag, parser in zip(PARSERS, (chat.tool_call_parser, chat.reasoning_parser), strict=True):
        if flag in values and values[flag].strip().lower() != parser.value:
            why = f"{flag} {values[flag]}: calls or reasoning would stay text; {parser.why}"
            problems.append((Status.WARN, why, f"{flag} {parser.value}"))
    longest = serving.longest(arguments, model.longest)
    if longest > model.longest:
        why = f"--max-model-len {longest}: the model is for {model.longest} tokens, and vLLM refuses more"
        problems.append((Status.FAIL, why, f"--max-model-len {model.longest}"))
    if flag_value(arguments, "--nnodes") in (None, "1"):
        for flag in PARALLEL:
            if values.get(flag, "").strip() not in ("", "1"):
                why = f"{flag} {values[flag]}: a Spark has one GPU"
                problems.append((Status.FAIL, why, f"leave {flag} out; several Sparks: ./inv cluster.up"))
    if not problems:
        return passed(f"{len(arguments)} arguments, none of them known to be harmful")
    worst = Status.FAIL if any(status is Status.FAIL for status, _, _ in problems) else Status.WARN
    problems.sort(key=lambda problem: problem[0] is not Status.FAIL)
    return CheckResult(worst, "; ".join(why for _, why, _ in problems), "; ".join(fix for _, _, fix in problems))


def missing_on_cpu(arguments: Sequence[str], machine: str, flags: Sequence[str]) -> str:
    """Return a sentence about instructions that vLLM's CPU build needs for these arguments and the processor lacks.

    It is empty if the processor lacks none. `flags` are those in /proc/cpuinfo. Source: `_get_attn_isa` in
    vllm/v1/attention/backends/cpu_attn.py, vLLM 0.32.0.
    """
    cache = flag_value(arguments, "--kv-cache-dtype") or "auto"
    if cache not in UNQUANTIZED and not (machine == "x86_64" and {"avx512f", "amx_tile"} & set(flags)):
        return f"--kv-cache-dtype {cache} needs an x86-64 processor with AVX-512 or AMX, and this {machine} has neither"
    return ""


@CHECKS.add(needs=("serve", "os", "cpu"), fix="./inv up --profile embedded   # or leave --kv-cache-dtype out")
def _cpu_arguments(view: View) -> CheckResult:
    """The processor has the instructions that the server's arguments need."""
    missing = missing_on_cpu(view.names("serve.args"), view.text("os.machine"), view.names("cpu.flags"))
    return judged(not missing, missing or "no argument needs an instruction that the processor lacks")
