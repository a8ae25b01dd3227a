"""Judge what was read, by the rules in `audit_rules.toml`. Pure: no file and no program but the rules themselves."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePath

from pydantic import BaseModel, ConfigDict, Field

from forge.cubins import Binary, Cubin, Kernel, Watch
from forge.elf import Host

PATH = Path(__file__).with_name("audit_rules.toml")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Demand(_Strict):
    """Kernels whose name matches have at least so many instructions that match `needs`."""

    name: str
    match: str
    at_least: int
    why: str
    needs: str = ""


class Claim(_Strict):
    """At least `count` kernels whose name matches have `at_least` instructions each that match `needs`."""

    match: str
    needs: str = ""
    at_least: int = 0
    count: int = 1


class Module(_Strict):
    """A module that can be asked for: its file, and the kernels that make it what it claims to be."""

    file: str
    kernels: tuple[Claim, ...] = Field(min_length=1)
    why: str


class Sass(_Strict):
    """Patterns of mnemonics, and the signs of a stub."""

    watched: str
    block_scaled: str
    fp4: str
    trap: str
    stub: int
    trap_strings: tuple[str, ...]


class Fp4(_Strict):
    """Where FP4 is in play, and what each kind of kernel must have."""

    kernel: str
    file: str
    kernels: tuple[Demand, ...]


class HostRules(_Strict):
    """What a library may ask of the machine."""

    glibc: tuple[int, int]
    runpath: str
    needed: tuple[str, ...]
    undefined: tuple[str, ...]


class Rules(_Strict):
    """The whole table."""

    schema_: int = Field(alias="schema", ge=1, le=1)
    capability: str
    suffixed: str
    sass: Sass
    fp4: Fp4
    modules: dict[str, Module]
    other_device: dict[str, str]
    host: HostRules
    fixes: dict[str, str]

    def watch(self) -> Watch:
        """Return what the reader has to keep for these rules."""
        names = "|".join(
            [self.fp4.kernel, *(claim.match for module in self.modules.values() for claim in module.kernels)]
        )
        return Watch(self.capability, self.sass.watched, names, self.sass.trap_strings)

    def demand(self, kernel: Kernel) -> Demand | None:
        """Return what is demanded of a kernel; None if nothing, because FP4 is not in its name."""
        if not re.search(self.fp4.kernel, kernel.name):
            return None
        return next(one for one in self.fp4.kernels if re.search(one.match, kernel.name))

    def foreign(self, kernel: Kernel) -> bool:
        """Tell whether the kernel was written for another architecture; it is no support, whatever it holds."""
        return bool(re.search(self.fp4.kernels[0].match, kernel.name))

    def stub(self, kernel: Kernel) -> bool:
        """Tell whether the kernel does nothing but trap, or was written for another architecture and traps."""
        short = kernel.instructions <= self.sass.stub
        return kernel.count(self.sass.trap) > 0 and (short or self.foreign(kernel))

    def fix(self, rule: str) -> str:
        """Return what to do about a rule's violation."""
        return self.fixes[rule].replace("{arch}", self.suffixed.removeprefix("sm_"))


@cache
def load(path: Path = PATH) -> Rules:
    """Return the rules. They are part of the program: a mistake in them raises what pydantic raises."""
    return Rules.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Violation:
    """One rule that one file breaks: `detail` says what was found, `fix` what to do."""

    rule: str
    file: str
    detail: str
    fix: str


Finding = tuple[str, str]  # rule, detail


def judge(binary: Binary, rules: Rules, *, machine: str = "") -> list[Violation]:
    """Return every violation of one file; `machine` (as `uname -m`) is demanded if given."""
    if binary.damage:
        found = [("damaged", binary.damage)]
    else:
        found = [*_code(binary, rules)]
        if binary.host:
            found += _host(binary.host, rules.host) if binary.host.shared else []
            found += _identity(binary.path, binary.host, machine)
    return [Violation(rule, binary.path, detail, rules.fix(rule)) for rule, detail in found]


def _code(binary: Binary, rules: Rules) -> Iterator[Finding]:
    """Judge the machine code: each cubin, then the file as a whole."""
    found = [one for cubin in binary.cubins for one in _cubin(cubin, rules)]
    yield from found
    if not binary.cubins:
        return
    loading = [cubin for cubin in binary.cubins if cubin.loads]
    base = PurePath(binary.path).name
    if not loading and not any(fnmatch(base, pattern) for pattern in rules.other_device):
        targets = ", ".join(sorted({cubin.target or "unknown" for cubin in binary.cubins}))
        yield "wrong-arch", f"it holds {targets}; none of it loads on {rules.capability}"
    hardware = any(kernel.count(rules.sass.fp4) for cubin in loading for kernel in cubin.kernels)
    kernels = sum(cubin.kernel_count for cubin in loading)
    if kernels and not hardware and not found and re.search(rules.fp4.file, base):
        yield _missing(loading[0].target, f"FP4 is in its name; all of its {kernels} kernels together", "E2M1")


def _cubin(cubin: Cubin, rules: Rules) -> Iterator[Finding]:
    if not cubin.target and cubin.sm in (120, 121):
        yield "no-target", f"{cubin.name} does not say what ptxas made it for"
    if cubin.target == rules.suffixed.rstrip("af"):
        yield "arch-suffix", f"{cubin.name} was built for {rules.capability} without the suffix: {cubin.target}"
    for kernel in cubin.kernels:
        demand = rules.demand(kernel)
        if demand and demand.at_least:
            yield from _kernel(cubin, kernel, demand, rules)
    trapping = [one for one in cubin.kernels if one.count(rules.sass.trap) and not rules.foreign(one)]
    if cubin.strings and trapping:
        yield "trap-string", f"{cubin.name} holds “{cubin.strings[0]}” and {shown(trapping[0])} traps"


def _kernel(cubin: Cubin, kernel: Kernel, demand: Demand, rules: Rules) -> Iterator[Finding]:
    have = kernel.count(demand.needs)
    if traps := kernel.count(rules.sass.trap):
        yield (
            "trap-stub",
            f"{shown(kernel)} ({cubin.target}) has {traps} x BPT.TRAP in {kernel.instructions} instructions",
        )
    elif have < demand.at_least:
        yield _missing(cubin.target, f"{shown(kernel)} ({kernel.instructions} instructions)", demand.needs, have)


def _missing(target: str, who: str, needs: str, have: int = 0) -> Finding:
    """Name the cause of absent FP4: the suffix is missing from the label, or only from the code under it."""
    told = f"{who}: {have} x {needs}"
    if target[-1] not in "af":
        return "arch-suffix", f"{told}; built for {target}, without the suffix"
    plain = target.rstrip("af").replace("sm_", "compute_")
    return "software-fp4", f"{told}; software under the label {target}, as {plain} assembled as {target} gives"


def _host(host: Host, rules: HostRules) -> Iterator[Finding]:
    def strays(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
        """Names in which no pattern is found."""
        return [name for name in names if not any(re.search(one, name) for one in patterns)]

    checks: dict[str, tuple[object, Callable[[], str]]] = {
        "needed": (found := strays(host.needed, rules.needed), lambda: f"it needs {', '.join(found)}"),
        "runpath": (paths := strays(host.runpath, [rules.runpath]), lambda: f"its run path is {':'.join(paths)}"),
        "glibc": (host.glibc > rules.glibc, lambda: f"it needs glibc {'.'.join(map(str, host.glibc))}"),
        "executable-stack": (host.executable_stack, lambda: "it asks for an executable stack"),
        "undefined": (
            names := strays(host.undefined, rules.undefined),
            lambda: f"nothing that it may use defines {', '.join(names[:5])}" + (" …" if len(names) > 5 else ""),
        ),
    }
    for rule, (wrong, detail) in checks.items():
        if wrong:
            yield rule, detail()


def _identity(path: str, host: Host, machine: str) -> Iterator[Finding]:
    """Judge whether the library is the one that its place says."""
    file = PurePath(path)
    stem = file.name.partition(".")[0]
    if machine and host.machine != machine:
        yield "swapped-library", f"it is for {host.machine}, not {machine}"
    if host.soname and host.soname != file.name:
        yield "swapped-library", f"it calls itself {host.soname}"
    extension = re.search(r"\.(abi3|cpython-\w+)[\w-]*\.so$", file.name)
    if extension and f"PyInit_{stem}" not in host.exports:
        yield "swapped-library", f"it is no Python module {stem}: PyInit_{stem} is not in it"
    # FlashInfer keeps each module as cached_ops/NAME/NAME.so.
    if file.suffix == ".so" and file.parent.parent.name == "cached_ops" and file.parent.name != file.stem:
        yield "swapped-library", f"it lies in the place of {file.parent.name}.so"


def judge_modules(binaries: Sequence[Binary], names: Sequence[str], rules: Rules) -> list[Violation]:
    """Return a violation for each named module that is not there or is not what it claims. Raises KeyError."""
    found = []
    for name in names:
        module = rules.modules[name]
        files = [one for one in binaries if fnmatch(PurePath(one.path).name, module.file)]
        if not files:
            detail = f"no {module.file} ({module.why})"
            found.append(Violation("missing-module", name, detail, rules.fix("missing-module")))
        elif broken := min((_broken(one, module) for one in files), key=len):
            claim, have = broken[0]
            wanted = f"{claim.count} kernels {claim.match}" + (
                f" with {claim.at_least} x {claim.needs}" * bool(claim.needs)
            )
            detail = f"it has {have} of {wanted} ({module.why})"
            found.append(Violation("swapped-library", files[0].path, detail, rules.fix("swapped-library")))
    return found


def _broken(binary: Binary, module: Module) -> list[tuple[Claim, int]]:
    """Return the claims that a file does not keep, each with the number of kernels that do."""
    kernels = [kernel for cubin in binary.cubins for kernel in cubin.kernels]
    counted = [(claim, sum(_keeps(kernel, claim) for kernel in kernels)) for claim in module.kernels]
    return [(claim, have) for claim, have in counted if have < claim.count]


def _keeps(kernel: Kernel, claim: Claim) -> bool:
    return bool(re.search(claim.match, kernel.name)) and kernel.count(claim.needs) >= claim.at_least


def shown(kernel: Kernel) -> str:
    """Return a kernel's name, cut so that a line holds it."""
    return kernel.name if len(kernel.name) <= 72 else f"{kernel.name[:40]}…{kernel.name[-30:]}"
