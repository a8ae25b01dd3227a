"""The audit's rules, `rules.toml`, and their application to binaries in memory. Reads no other file."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import AfterValidator, Field

from sparkforge.audit.cubins import Binary, Cubin, Kernel, Watch, compiles
from sparkforge.audit.elf import Host
from sparkforge.core import tables
from sparkforge.core.tables import Record

PATH = Path(__file__).with_name("rules.toml")


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a pattern: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiled)]


class Demand(Record):
    """A minimal number of instructions that match `needs`, for kernels whose name matches."""

    name: str
    match: Pattern
    at_least: int
    why: str
    needs: Pattern = ""


class Claim(Record):
    """A rule: `count` or more kernels with a matching name have `at_least` instructions each that match `needs`."""

    match: Pattern
    needs: Pattern = ""
    at_least: int = 0
    count: int = 1


class ModuleRule(Record):
    """A module that can be requested: its file, and the kernels that identify it."""

    file: str
    kernels: tuple[Claim, ...] = Field(min_length=1)
    why: str


class Sass(Record):
    """Patterns of mnemonics, and the texts of kernels that only trap."""

    watched: Pattern
    block_scaled: Pattern
    fp4: Pattern
    trap: Pattern
    trap_strings: tuple[str, ...]


class Fp4(Record):
    """The kernels that must use FP4, and the required instructions of each kind."""

    kernel: Pattern
    file: Pattern
    kernels: tuple[Demand, ...] = Field(min_length=1)


class HostRules(Record):
    """The limits on a library's system requirements."""

    glibc: tuple[int, int]
    runpath: Pattern
    needed: tuple[Pattern, ...]
    undefined: tuple[Pattern, ...]


class Rules(Record):
    """The whole of rules.toml."""

    schema_: int = Field(alias="schema", ge=1, le=1)
    capability: str
    suffixed: str
    sass: Sass
    fp4: Fp4
    modules: dict[str, ModuleRule]
    other_device: dict[str, str]
    host: HostRules
    fixes: dict[str, str]

    def watch(self) -> Watch:
        """Return the selection of kernels and instructions that the reader keeps for these rules."""
        names = [self.fp4.kernel, *(claim.match for module in self.modules.values() for claim in module.kernels)]
        return Watch(self.capability, self.sass.watched, "|".join(names), self.sass.trap_strings)

    def demand(self, kernel: Kernel) -> Demand | None:
        """Return the demand on a kernel; None for a kernel whose name does not match the FP4 kernels."""
        if not re.search(self.fp4.kernel, kernel.name):
            return None
        return next(demand for demand in self.fp4.kernels if re.search(demand.match, kernel.name))

    def foreign(self, kernel: Kernel) -> bool:
        """Tell whether the kernel was written for another architecture, so that its instructions do not count."""
        return bool(re.search(self.fp4.kernels[0].match, kernel.name))

    def names(self, path: str) -> bool:
        """Tell whether the table names a file, which is then treated as a file of our image."""
        base = PurePath(path).name
        patterns = (*(module.file for module in self.modules.values()), *self.other_device)
        return any(fnmatch(base, pattern) for pattern in patterns)

    def fix(self, rule: str) -> str:
        """Return the fix for a violation of a rule."""
        return self.fixes[rule].replace("{arch}", self.suffixed.removeprefix("sm_"))


@cache
def load(path: Path = PATH) -> Rules:
    """Return the rules. Raises InputError for a table that is unreadable or invalid."""
    return tables.load(path, Rules)


@dataclass(frozen=True)
class Violation:
    """One rule that one file breaks, with the finding (`detail`) and the fix."""

    rule: str
    file: str
    detail: str
    fix: str


def judge(binary: Binary, rules: Rules, *, machine: str = "", ours: bool = True) -> list[Violation]:
    """Return every violation of one file; `machine` (as `uname -m`) is required if given.

    The requirements of our image (targets, libraries, run paths, symbols, names) apply only if `ours`.
    """
    if binary.damage:
        findings = [("damaged", binary.damage)]
    else:
        findings = [*_code(binary, rules, ours=ours)]
        if host := binary.host:
            if machine and host.machine != machine:
                findings.append(("swapped-library", f"it is for {host.machine}, not {machine}"))
            if host.shared and host.glibc > rules.host.glibc:
                findings.append(("glibc", f"it needs glibc {'.'.join(map(str, host.glibc))}"))
            if host.shared and host.executable_stack:
                findings.append(("executable-stack", "it requires an executable stack"))
            if ours:
                findings += _image(host, rules.host) if host.shared else []
                findings += _identity(binary.path, host)
    return [Violation(rule, binary.path, detail, rules.fix(rule)) for rule, detail in findings]


def _code(binary: Binary, rules: Rules, *, ours: bool) -> Iterator[tuple[str, str]]:
    findings = [finding for cubin in binary.cubins for finding in _cubin(cubin, rules, ours=ours)]
    yield from findings
    loading = [cubin for cubin in binary.cubins if cubin.loads]
    if not loading and not any(fnmatch(PurePath(binary.path).name, pattern) for pattern in rules.other_device):
        yield from _nothing_loads(binary, rules.capability, ours=ours)
    hardware = any(kernel.count(rules.sass.fp4) for cubin in loading for kernel in cubin.kernels)
    kernels = sum(cubin.kernel_count for cubin in loading)
    if ours and kernels and not hardware and not findings and re.search(rules.fp4.file, PurePath(binary.path).name):
        yield _absent(loading[0].target, f"FP4 is in its name; all of its {kernels} kernels together: 0 x E2M1")


def _nothing_loads(binary: Binary, capability: str, *, ours: bool) -> Iterator[tuple[str, str]]:
    """Yield the violation of a file without machine code for the device; PTX is enough for a file that is not ours."""
    ptx = sorted(set(binary.host.ptx)) if binary.host else []
    targets = sorted({cubin.label for cubin in binary.cubins})
    if not targets and not ptx and not (binary.host and binary.host.other):
        return
    contents = ", ".join([*targets, *(f"PTX for {name}" for name in ptx)]) or "code for the linker"
    if compilable := [name for name in ptx if compiles(name, capability)]:
        if ours:
            why = f"the driver compiles {compilable[-1]} at run time, so the kernels' machine code is unknown"
            yield "wrong-arch", f"it holds {contents} and no machine code that loads on {capability}; {why}"
    elif targets or ptx:
        yield "wrong-arch", f"it holds {contents}; none of it loads on {capability}"
    else:
        yield "wrong-arch", f"it holds {contents} and no machine code; none for {capability} is proven"


def _cubin(cubin: Cubin, rules: Rules, *, ours: bool) -> Iterator[tuple[str, str]]:
    if not cubin.target and cubin.sm in (120, 121):
        yield "no-target", f"{cubin.name} does not state its target"
    if ours and cubin.target == rules.suffixed.rstrip("af"):
        yield "arch-suffix", f"{cubin.name} was built for {rules.capability} without the suffix: {cubin.target}"
    for kernel in cubin.kernels:
        demand = rules.demand(kernel)
        if not demand or not demand.at_least:
            continue
        name, count = _shortened(kernel.name), kernel.count(demand.needs)
        if traps := kernel.count(rules.sass.trap):
            yield "trap-stub", f"{name} ({cubin.target}) has {traps} x BPT.TRAP in {kernel.instructions} instructions"
        elif count < demand.at_least:
            detail = f"{name} ({kernel.instructions} instructions): {count} x {demand.needs}"
            yield _absent(cubin.target, detail)
    trapping = [kernel for kernel in cubin.kernels if kernel.count(rules.sass.trap) and not rules.foreign(kernel)]
    if cubin.strings and trapping:
        yield "trap-string", f"{cubin.name} holds “{cubin.strings[0]}” and {_shortened(trapping[0].name)} traps"


def _absent(target: str, detail: str) -> tuple[str, str]:
    """Return the rule and the detail for missing FP4: a target without suffix, or software code despite the suffix."""
    if target[-1] not in "af":
        return "arch-suffix", f"{detail}; built for {target}, without the suffix"
    plain = target.rstrip("af").replace("sm_", "compute_")
    return "software-fp4", f"{detail}; software under the label {target}, like {plain} assembled as {target}"


def _image(host: Host, rules: HostRules) -> Iterator[tuple[str, str]]:
    def without(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
        return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]

    if needed := without(host.needed, rules.needed):
        yield "needed", f"it needs {', '.join(needed)}"
    if paths := without(host.runpath, [rules.runpath]):
        yield "runpath", f"its run path is {':'.join(paths)}"
    if undefined := without(host.undefined, rules.undefined):
        names = ", ".join(undefined[:5]) + (" …" if len(undefined) > 5 else "")
        yield "undefined", f"none of its allowed libraries defines {names}"


def _identity(path: str, host: Host) -> Iterator[tuple[str, str]]:
    file = PurePath(path)
    stem = file.name.partition(".")[0]
    if host.soname and host.soname != file.name:
        yield "swapped-library", f"its soname is {host.soname}"
    extension = re.search(r"\.(abi3|cpython-\w+)[\w-]*\.so$", file.name)
    if extension and f"PyInit_{stem}" not in host.exports:
        yield "swapped-library", f"it is not the Python module {stem}: it has no PyInit_{stem}"
    # FlashInfer keeps each module as cached_ops/NAME/NAME.so.
    if file.suffix == ".so" and file.parent.parent.name == "cached_ops" and file.parent.name != file.stem:
        yield "swapped-library", f"it is in the folder of {file.parent.name}.so"


def judge_modules(binaries: Sequence[Binary], names: Sequence[str], rules: Rules) -> list[Violation]:
    """Return a violation for each module that is missing or lacks its kernels. Raises KeyError for an unknown name."""
    violations = []
    for name in names:
        module = rules.modules[name]
        files = [binary for binary in binaries if fnmatch(PurePath(binary.path).name, module.file)]
        if not files:
            detail = f"no {module.file} ({module.why})"
            violations.append(Violation("missing-module", name, detail, rules.fix("missing-module")))
        elif broken := min((_broken(binary, module) for binary in files), key=len):
            claim, count = broken[0]
            condition = f" with {claim.at_least} x {claim.needs}" if claim.needs else ""
            detail = f"it has {count} of {claim.count} kernels {claim.match}{condition} ({module.why})"
            violations.append(Violation("swapped-library", files[0].path, detail, rules.fix("swapped-library")))
    return violations


def _broken(binary: Binary, module: ModuleRule) -> list[tuple[Claim, int]]:
    broken, kernels = [], [kernel for cubin in binary.cubins for kernel in cubin.kernels]
    for claim in module.kernels:
        matching = (kernel for kernel in kernels if re.search(claim.match, kernel.name))
        count = sum(kernel.count(claim.needs) >= claim.at_least for kernel in matching)
        if count < claim.count:
            broken.append((claim, count))
    return broken


def _shortened(name: str) -> str:
    return name if len(name) <= 72 else f"{name[:40]}…{name[-30:]}"
