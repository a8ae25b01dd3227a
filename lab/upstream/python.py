"""Finds the definitions of a Python package in its sources by `ast`; no code is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core.errors import InputError
from sparkforge.core.files import read_bytes

LARGEST = 16 << 20  # bytes of one source file
MOST_STEPS = 20  # re-exports between a name and its definition

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where a name is defined; `arguments` is None if the sources do not say what a call takes."""

    module: str
    node: ast.AST
    arguments: ast.arguments | None = None
    bound: bool = False  # a class: its first argument is the new object


class UnfollowedError(Exception):
    """A name may be defined, but only running the package would show it."""


@dataclass(frozen=True)
class Package:
    """The Python sources under `root`, a folder that would be on sys.path."""

    root: Path
    _modules: dict[str, ast.Module | None] = field(default_factory=dict, repr=False, compare=False)

    def path(self, module: str) -> Path | None:
        """Return a module's file; None if there is no such module."""
        stem = self.root.joinpath(*module.split("."))
        return next(
            (file for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if file.is_file()), None
        )

    def module(self, name: str) -> ast.Module | None:
        """Return a parsed module; None if there is no such module. Raises InputError for invalid Python."""
        if name not in self._modules:
            file = self.path(name)
            self._modules[name] = parse(file, self.root) if file else None
        return self._modules[name]

    def find(self, module: str, name: str, steps: int = 0) -> Definition | None:
        """Return the definition behind `name` of `module`, through re-exports; None if there is none.

        Raises UnfollowedError if a module's `__getattr__` or too many re-exports hide it.
        """
        tree = self.module(module)
        if tree is None:
            return None
        if steps > MOST_STEPS:
            raise UnfollowedError(f"{module}.{name} is re-exported more than {MOST_STEPS} times")
        statements = list(statements_of(tree.body))
        definition = self._own(module, statements, name, steps) or self._imported(module, statements, name, steps)
        if definition is None and any(name in assigned_names(node) and not _is_none(node) for node in statements):
            definition = Definition(module, tree)
        if definition is None and self.path(f"{module}.{name}"):
            definition = Definition(f"{module}.{name}", tree)
        if definition is None and any(isinstance(node, Function) and node.name == "__getattr__" for node in statements):
            raise UnfollowedError(f"{module} decides by __getattr__ whether it has {name}")
        return definition

    def _own(self, module: str, statements: Sequence[ast.stmt], name: str, steps: int) -> Definition | None:
        """Return the last function or class of that name in a module; `overload`s do not count."""
        for node in reversed(statements):
            if isinstance(node, Function) and node.name == name and not _is_overload(node):
                return Definition(module, node, node.args)
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Definition(module, node, self._constructor(module, node, steps), bound=True)
        return None

    def _imported(self, module: str, statements: Sequence[ast.stmt], name: str, steps: int) -> Definition | None:
        """Follow the imports of a name; return the first definition found. Raises UnfollowedError."""
        unfollowed: UnfollowedError | None = None
        for origin, original in self._origins(module, statements, name):
            try:
                if definition := self.find(origin, original, steps + 1):
                    return definition
            except UnfollowedError as error:
                unfollowed = error
        if unfollowed is not None:
            raise unfollowed
        return None

    def _origins(self, module: str, statements: Sequence[ast.stmt], name: str) -> Iterator[tuple[str, str]]:
        """Yield (module, name) of every import or assignment that gives `module` the name `name`, stars last."""
        stars = []
        for node in statements:
            if isinstance(node, ast.ImportFrom):
                origin = self.absolute(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        stars.append((origin, name))
                    elif (alias.asname or alias.name) == name and (origin, alias.name) != (module, name):
                        yield origin, alias.name
            elif name in assigned_names(node) and isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                yield module, node.value.id
        yield from stars

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that an import in `module` names."""
        if not node.level:
            return node.module or ""
        file = self.path(module)
        parts = module.split(".")
        keep = len(parts) - node.level + (1 if file and file.name == "__init__.py" else 0)
        return ".".join([*parts[: max(keep, 0)], *([node.module] if node.module else [])])

    def _constructor(self, module: str, node: ast.ClassDef, steps: int) -> ast.arguments | None:
        """Return the arguments of a class's `__init__`, its own or the first that a base has."""
        for statement in statements_of(node.body):
            if isinstance(statement, Function) and statement.name == "__init__":
                return statement.args
        for base in node.bases:
            if isinstance(base, ast.Name) and (definition := self.find(module, base.id, steps + 1)):
                return definition.arguments
        return None


def parse(file: Path, root: Path) -> ast.Module:
    """Parse a source file. Raises InputError if it is too large or no Python of this interpreter's version."""
    try:
        return ast.parse(read_bytes(file, largest=LARGEST))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise InputError(
            f"cannot read {file.relative_to(root)}",
            f"{type(error).__name__}: {error}",
            "run it with a newer Python, or look at that file of the release",
            code="input.pins",
        ) from error


def statements_of(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those inside `if`, `try` and `with` included, in order."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                inner = getattr(node, part, [])
                for entry in inner:
                    yield from statements_of(entry.body if isinstance(entry, ast.ExceptHandler) else [entry])


def assigned_names(node: ast.stmt) -> set[str]:
    """Return the plain names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_none(node: ast.stmt) -> bool:
    """Tell whether a statement assigns None, as packages do after a failed import."""
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and value.value is None


def _is_overload(node: Function) -> bool:
    return any(ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in node.decorator_list)


def parameters(definition: Definition) -> tuple[str, ...]:
    """Return the names that a call may use, `*` and `**` included, without `self`."""
    arguments = definition.arguments
    if arguments is None:
        return ()
    plain = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][definition.bound :]
    extra = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    return (*plain, *extra, *keywords, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else []))


def refusal(definition: Definition, positional: int, keywords: Sequence[str], *, open_ended: bool = False) -> str:
    """Return why a call does not fit a signature; empty if it fits or the signature is unknown.

    `positional` is the number of positional arguments; `open_ended` says that `*` or `**` may add more.
    """
    arguments = definition.arguments
    if arguments is None:
        return ""
    ordered = [*arguments.posonlyargs, *arguments.args][definition.bound :]
    names = [argument.arg for argument in ordered]
    by_name = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
    if unknown := [keyword for keyword in keywords if keyword not in by_name and not arguments.kwarg]:
        return f"it has no {', '.join(unknown)}"
    if positional > len(names) and not arguments.vararg:
        return f"it takes {len(names)} positional arguments, the call passes {positional}"
    if twice := [keyword for keyword in keywords if keyword in names[:positional]]:
        return f"{', '.join(twice)} is passed twice"
    if open_ended:
        return ""
    optional = len(arguments.defaults)
    required = names[: len(names) - optional] if optional else names
    required += [argument.arg for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                 if default is None]  # fmt: skip
    missing = [name for name in required if name not in keywords and name not in names[:positional]]
    return f"it needs {', '.join(missing)} as well" if missing else ""
