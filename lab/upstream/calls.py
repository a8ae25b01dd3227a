"""The kernel set's call sites: the functions of FlashInfer that vLLM calls, and whether a release has them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lab.upstream.effect import Column, Effect, Observation
from lab.upstream.python import LARGEST, Definition, Package, UnfollowedError, parameters, parse, refusal
from sparkforge.compile.flashinfer.sets import Call, KernelModule, KernelTable
from sparkforge.core.errors import InputError
from sparkforge.core.files import read_bytes

CALLER, CALLEE = "vllm", "flashinfer"  # import names


@dataclass(frozen=True)
class Wanted:
    """The name in a line of a kernel set: a dotted callee, or a name that is imported from `module`."""

    name: str
    module: str = ""

    @classmethod
    def read(cls, text: str) -> Wanted:
        """Read the `text` of a call: `from M import N`, `f(` or `x = m.f(`. Raises InputError for anything else."""
        try:
            statement = ast.parse(text + (")" if text.rstrip().endswith("(") else "")).body[0]
        except (SyntaxError, ValueError, IndexError):
            statement = ast.Pass()
        if isinstance(statement, ast.ImportFrom) and len(statement.names) == 1:
            return cls(statement.names[0].name, statement.module or "")
        if isinstance(statement, ast.Assign | ast.Expr | ast.Return) and isinstance(statement.value, ast.Call):
            return cls(ast.unparse(statement.value.func))
        raise InputError(f"cannot read the call {text!r}", "it is neither an import nor a call",
                         "correct the kernel set", code="input.pins")  # fmt: skip

    def imports(self, tree: ast.AST) -> list[ast.ImportFrom]:
        """Return the imports of exactly this name."""
        return [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module == self.module
            and any(alias.name == self.name for alias in node.names)
        ]

    def sites(self, tree: ast.AST) -> list[ast.Call]:
        """Return the calls of this name in a module."""
        names = {self.name}
        if self.module:
            names = {
                alias.asname or alias.name
                for node in self.imports(tree)
                for alias in node.names
                if alias.name == self.name
            }
        return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]

    def lines(self, tree: ast.AST) -> list[int]:
        """Return the lines that call the name, or import it if the kernel set names an import."""
        nodes = self.imports(tree) if self.module else self.sites(tree)
        return sorted(node.lineno for node in nodes)


def check(table: KernelTable, vllm: Package, flashinfer: Package, pinned: Package | None = None) -> Column:
    """Follow every call and every module of a kernel set from vLLM's sources into FlashInfer's.

    `pinned` is the FlashInfer that the set was written for; changed signatures are reported. Names that a patch of the
    queue adds are left out, because no release has them; the patches are judged separately. Raises InputError for a
    kernel set or a source file that cannot be read.
    """
    modules = [module for module in table.module if not module.patch]
    calls = table.calls.keys() - {module.call for module in table.module} | {module.call for module in modules}
    observations = list[Observation]()
    for name, call in table.calls.items():
        if name in calls:
            observations += _check_call(name, call, vllm, flashinfer, pinned)
    observations += dict.fromkeys(_check_generators(modules, flashinfer))
    generators = len({module.generator for module in modules})
    broken = sum(entry.effect is Effect.BREAKS for entry in observations)
    moved = sum(entry.effect is Effect.CHANGED for entry in observations)
    summary = f"{len(calls)} calls, {generators} generators"
    if broken:
        summary = f"{broken} broken of {summary}"
    elif moved:
        summary += f", {moved} changed"
    return Column(summary, tuple(observations))


def _check_call(
    name: str, call: Call, vllm: Package, flashinfer: Package, pinned: Package | None
) -> Iterator[Observation]:
    """Yield the changes that affect one call."""
    wanted = Wanted.read(call.text)
    file = vllm.root / call.file
    tree = parse(file, vllm.root) if file.is_file() else None
    lines = wanted.lines(tree) if tree else []
    if tree is None or not lines:
        places = _places(wanted, vllm)
        location = f"it is called in {', '.join(places)} now" if places else "vLLM calls it nowhere"
        yield Observation(Effect.BREAKS, f"{name}: {call.file} has no {call.text!r}; {location}")
        return
    source = file.read_text(encoding="utf-8", errors="replace").splitlines()
    matching = [number for number, line in enumerate(source, 1) if call.text in line]
    if call.line not in matching:
        line = min(matching or lines, key=lambda number: abs(number - call.line))
        change = "moved to" if matching else "is written otherwise in"
        yield Observation(Effect.CHANGED, f"{name}: {call.file}:{call.line} {change} line {line}")
    if target := next(_targets(wanted, tree, vllm), None):
        yield from _check_target(name, target, wanted.sites(tree), flashinfer, pinned)
    else:
        text = f"{name}: {call.file}:{lines[0]} does not say which function of FlashInfer {wanted.name} is"
        yield Observation(Effect.UNKNOWN, text)


def _places(wanted: Wanted, vllm: Package) -> list[str]:
    """Return the other places where vLLM calls the name, as `file:line`."""
    last = wanted.name.rpartition(".")[2].encode()
    places = []
    for file in sorted((vllm.root / CALLER).rglob("*.py")):
        if last in read_bytes(file, largest=LARGEST):
            relative = file.relative_to(vllm.root)
            places += [f"{relative}:{line}" for line in wanted.lines(parse(file, vllm.root))]
    return places


def _targets(wanted: Wanted, tree: ast.Module, vllm: Package) -> Iterator[tuple[str, str]]:
    """Yield FlashInfer's (module, name) of the object that a module of vLLM calls `wanted`."""
    if wanted.module:
        yield wanted.module, wanted.name
        return
    first, *rest = wanted.name.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any((alias.asname or alias.name) == first for alias in node.names) and rest:
            module = next(alias.name for alias in node.names if (alias.asname or alias.name) == first)
            if module.partition(".")[0] == CALLEE:
                yield ".".join([module, *rest[:-1]]), rest[-1]
        elif isinstance(node, ast.ImportFrom) and not rest:
            for alias in node.names:
                if (alias.asname or alias.name) != first:
                    continue
                if (node.module or "").partition(".")[0] == CALLEE:
                    yield str(node.module), alias.name
                elif (node.module or "").partition(".")[0] == CALLER:
                    yield from _wrapped(vllm, str(node.module), alias.name)


def _wrapped(vllm: Package, module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the target of vLLM's own `name = wrapper("flashinfer.module", "function")`."""
    tree = vllm.module(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            strings = [argument.value for argument in node.value.args if isinstance(argument, ast.Constant)]
            is_it = any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
            if is_it and len(strings) >= 2 and str(strings[0]).partition(".")[0] == CALLEE:
                yield str(strings[0]), str(strings[1])


def _check_target(
    name: str, target: tuple[str, str], sites: list[ast.Call], flashinfer: Package, pinned: Package | None
) -> Iterator[Observation]:
    """Yield calls that do not fit FlashInfer's signature, and how the signature differs from the pinned release's."""
    dotted = ".".join(target)
    try:
        definition = flashinfer.find(*target)
        before = pinned.find(*target) if pinned else None
    except UnfollowedError as error:
        yield Observation(Effect.UNKNOWN, f"{name}: {error}")
        return
    if definition is None:
        yield Observation(Effect.BREAKS, f"{name}: FlashInfer has no {dotted}")
        return
    for site in sites:
        positional = [word for word in site.args if not isinstance(word, ast.Starred)]
        keywords = [keyword.arg for keyword in site.keywords if keyword.arg]
        is_open = len(positional) < len(site.args) or len(keywords) < len(site.keywords)
        if why := refusal(definition, len(positional), keywords, open_ended=is_open):
            yield Observation(Effect.BREAKS, f"{name}: vLLM's call in line {site.lineno} does not fit {dotted}: {why}")
    if before and (difference := _difference(before, definition)):
        yield Observation(Effect.NONE, f"{name}: {dotted} has other parameters: {difference}")


def _difference(before: Definition, after: Definition) -> str:
    """Return the parameters that were added and removed, such as `+enable_pdl, -tune`."""
    old, new = parameters(before), parameters(after)
    return ", ".join(
        [*(f"+{name}" for name in new if name not in old), *(f"-{name}" for name in old if name not in new)]
    )


def _check_generators(modules: Iterable[KernelModule], flashinfer: Package) -> Iterator[Observation]:
    """Yield the modules' generators, and the objects passed to them, that a FlashInfer release lacks."""
    for module in modules:
        home, _, function = module.generator.partition(":")
        generator = f"{home}.{function}"
        try:
            definition = flashinfer.find(home, function)
            if definition is None:
                yield Observation(Effect.BREAKS, f"FlashInfer has no {generator}")
            elif why := refusal(definition, 0, list(module.arguments)):
                yield Observation(Effect.BREAKS, f"the set's arguments do not fit {generator}: {why}")
            for value in module.arguments.values():
                if isinstance(value, str) and value.startswith(f"@{CALLEE}"):
                    value_home, _, name = value[1:].partition(":")
                    if flashinfer.find(value_home, name) is None:
                        yield Observation(Effect.BREAKS, f"FlashInfer has no {value_home}.{name}")
        except UnfollowedError as error:
            yield Observation(Effect.UNKNOWN, f"{generator}: {error}")
