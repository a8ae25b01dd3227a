"""The environment variables and flags that our profiles use, and whether a release still has them."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lab.upstream.effect import Column, Effect, Observation
from lab.upstream.python import LARGEST, parse, statements_of
from sparkforge.compile.flashinfer.build import COMPILER_VARIABLES
from sparkforge.compile.flashinfer.sets import KernelTable
from sparkforge.core.files import read_bytes
from sparkforge.patching.series import Queue
from sparkforge.serve import command_line
from sparkforge.serve.profiles import ServeProfile

ENGINE = Path("vllm/engine/arg_utils.py")
ENVIRONMENT, VARIABLES = Path("vllm/envs.py"), "environment_variables"
ENTRYPOINTS = Path("vllm/entrypoints")
PARSER, FIELDS = "make_arg_parser", "FrontendArgs"  # a function and a class; their module moves between releases
KERNEL_VARIABLES = (
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_WORKSPACE_BASE",
    *COMPILER_VARIABLES,
)  # compile/flashinfer/build.py


def check_server(
    root: Path, profiles: Mapping[str, ServeProfile], table: KernelTable | None, parsed: Mapping[str, str] | str
) -> Column:
    """Look for each flag and variable of `profiles` in the vLLM under `root`.

    `parsed` is the error of the release's own parser for each profile, empty if it accepts it; or the reason why the
    parser did not run.
    """
    wanted_flags = {flag.partition(".")[0]: name for name, profile in profiles.items() for flag in profile.flags}
    wanted_variables = dict.fromkeys(command_line.ENVIRONMENT, "every server")
    wanted_variables |= dict.fromkeys(table.server if table else (), "the kernel set")
    wanted_variables |= {name: key for key, profile in profiles.items() for name in profile.variables()}
    wanted_variables = {name: user for name, user in wanted_variables.items() if name.startswith("VLLM_")}
    observations = [
        *_missing("flag", wanted_flags, flags(root)),
        *_missing("variable", wanted_variables, variables(root)),
    ]
    summary = f"{len(wanted_flags)} flags, {len(wanted_variables)} variables"
    if isinstance(parsed, str):
        observations.append(Observation(Effect.NONE, f"the release's own parser was not asked: {parsed}"))
    else:
        refused = {name: error for name, error in parsed.items() if error}
        observations += [
            Observation(Effect.BREAKS, f"the release's own parser refuses the profile {name}: {error}")
            for name, error in refused.items()
        ]
        summary += f"; {len(parsed) - len(refused)} of {len(parsed)} profiles parsed"
    return Column(summary, tuple(observations))


def check_kernels(root: Path, table: KernelTable | None, queue: Queue) -> Column:
    """Look for each variable that a kernel build sets in the FlashInfer under `root`, or in its queue."""
    names = dict.fromkeys(
        name for name in (*KERNEL_VARIABLES, *(table.environment if table else ())) if name.startswith("FLASHINFER_")
    )
    quoted = re.compile(rb"""["'](FLASHINFER_[A-Z0-9_]+)["']""")
    offered = {match for file in sorted((root / "flashinfer").rglob("*.py"))
               for match in quoted.findall(read_bytes(file, largest=LARGEST))}  # fmt: skip
    added = b"\n".join(line for patch in queue.patches for change in patch.changes
                       for hunk in change.hunks for line in hunk.after)  # fmt: skip
    observations = [
        Observation(Effect.BREAKS, f"nothing in the release reads {name}, and no patch adds it")
        for name in names
        if name.encode() not in offered and not re.search(rf"\b{name}\b".encode(), added)
    ]
    return Column(f"{len(names)} variables", tuple(observations))


def _missing(kind: str, wanted: Mapping[str, str], offered: Mapping[str, bool] | None) -> Iterator[Observation]:
    """Yield an observation for each wanted name that is not offered, or is deprecated."""
    if offered is None:
        yield Observation(Effect.UNKNOWN, f"cannot find where the release lists its {kind}s")
        return
    for name, user in wanted.items():
        if name not in offered:
            matches = difflib.get_close_matches(name, offered, n=1, cutoff=0.7)
            hint = f"; the nearest name there is {matches[0]}" if matches else ""
            yield Observation(Effect.BREAKS, f"it has no {kind} {name}, which {user} uses{hint}")
        elif offered[name]:
            yield Observation(Effect.CHANGED, f"the {kind} {name}, which {user} uses, is deprecated")


def flags(root: Path) -> dict[str, bool] | None:
    """Return every flag of the API server, and whether it is deprecated; None if the files have moved."""
    parser = parser_file(root)
    if parser is None or not (root / ENGINE).is_file():
        return None
    offered = dict[str, bool]()
    for file in (parser, root / ENGINE):
        tree = parse(file, root)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                deprecated = any(
                    word.arg == "deprecated" and isinstance(word.value, ast.Constant) and word.value.value
                    for word in node.keywords
                )
                offered |= dict.fromkeys(_texts(node.args, "--"), deprecated)
            elif isinstance(node, ast.ClassDef) and node.name.endswith(FIELDS):
                names = [entry.target.id for entry in node.body
                         if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)]  # fmt: skip
                offered |= {f"--{name.replace('_', '-')}": False for name in names}
    return offered


def variables(root: Path) -> dict[str, bool] | None:
    """Return every environment variable of vLLM, as `flags` does (none is deprecated); None if the table is gone."""
    if not (root / ENVIRONMENT).is_file():
        return None
    for node in statements_of(parse(root / ENVIRONMENT, root).body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(isinstance(t, ast.Name) and t.id == VARIABLES for t in targets):
            return dict.fromkeys(_texts([key for key in value.keys if key is not None], ""), False)
    return None


def parser_file(root: Path) -> Path | None:
    """Return the file that makes the API server's parser; None if there is none."""
    for file in sorted((root / ENTRYPOINTS).rglob("cli_args.py")):
        content = read_bytes(file, largest=LARGEST)
        if f"def {PARSER}(".encode() in content and f"class {FIELDS}(".encode() in content:
            return file
    return None


def _texts(nodes: Iterable[ast.expr], prefix: str) -> list[str]:
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(prefix)
    ]
