"""`lab.upstream check`: the effect of each release on the queue, pins, kernel set, profiles and experts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from lab.patches import status, upstream
from lab.patches.status import Judgement, Verdict
from lab.patches.upstream import Release
from lab.upstream import calls, dependencies, experts, options
from lab.upstream.effect import NOT_APPLICABLE, Column, Effect, Observation, undetermined
from lab.upstream.experts import ReleaseAnswer
from lab.upstream.python import Package
from lab.upstream.releases import Candidate, candidates, exact_requirements, unpacked, work_folder
from lab.upstream.report import PARTS, CheckReport, ReleaseReport
from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.flashinfer.sets import KernelTable
from sparkforge.core.console import Steps, echo, echo_json
from sparkforge.core.errors import InputError, NetworkError, SparkforgeError, UsageError
from sparkforge.core.files import DocumentError, locked, write_atomic
from sparkforge.core.manifest import remove
from sparkforge.environments import TEST, Environment
from sparkforge.image.devices import EMBEDDED, stack_of
from sparkforge.patching.hunks import Content
from sparkforge.patching.series import PATCHES
from sparkforge.pins import Component, Pins
from sparkforge.serve import profiles
from sparkforge.serve.profiles import ServeProfile

VLLM, FLASHINFER = "vllm", "flashinfer"  # upstreams, as folders of patches/ and components of a stack name them
EFFECTS = {
    Verdict.APPLIES: Effect.NONE,
    Verdict.OFFSET: Effect.CHANGED,
    Verdict.UPSTREAM: Effect.CHANGED,
    Verdict.CONFLICTS: Effect.BREAKS,
}
NO_PYTHON = "no interpreter with torch and vLLM's dependencies: `./inv up` makes one, or name one with --python"
STATIC = "--static runs no code of a release"


@dataclass
class StackCheck:
    """The check of one stack. Folders of the pinned releases stay until `folders` is closed.

    `python` runs vLLM's own code; if it is None, `why_static` is the reason.
    """

    table: Pins
    stack: str
    patches: Path
    kernels: KernelTable | None
    profiles: Mapping[str, ServeProfile]
    python: Path | None = None
    why_static: str = ""
    folders: ExitStack = field(default_factory=ExitStack)
    _pinned: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Pins, stack: str, python: str = "", *, static: bool = False) -> StackCheck:
        """Return the check of a stack with its own kernel table and profiles.

        Raises UsageError for a `python` that cannot be run, InputError for an unknown stack or a malformed table.
        """
        interpreter = None if static else _interpreter(python)
        pinned, kernels = table.stack(stack), None  # a stack that compiles no kernels has no kernel table
        if FLASHINFER in pinned.components and pinned.image and pinned.image.kernels:
            kernels = sets.load(pinned.components[FLASHINFER].version)
        flags = profiles.load(stack=stack)
        return cls(table, stack, PATCHES, kernels, flags, interpreter, STATIC if static else NO_PYTHON)

    def run(self, candidate: Candidate) -> ReleaseReport:
        """Check one release. Raises the errors of `unpacked`; a part whose files cannot be read is undetermined."""
        with unpacked(candidate.release, candidate.queue) as root:
            requires = exact_requirements(root)
            judgements, contents = status.carry(
                candidate.queue, lambda path: (root / path).read_bytes() if (root / path).is_file() else None
            )
            columns = dict.fromkeys(PARTS, NOT_APPLICABLE)
            columns["patches"] = _patches(judgements)
            if candidate.release.top:
                stack = self.table.stack(self.stack)
                names = [name for name, component in stack.components.items() if component is candidate.component]
                pins_by_git = {name: pin for name, pin in stack.git.items() if pin.of in names}
                columns["git dependencies"] = dependencies.check(root, pins_by_git)
            partner = ""
            if candidate.queue.upstream == VLLM:
                partner, columns["kernel calls"] = self._calls_of_vllm(root, requires)
                stock, patched = self._answers(root, judgements, contents)
                columns["flags and variables"] = _or_undetermined(
                    lambda: options.check_server(root, self.profiles, self.kernels, stock.profiles)
                )
                columns["experts"] = experts.column(stock, patched)
            elif candidate.queue.upstream == FLASHINFER:
                partner, columns["kernel calls"] = self._calls_of_flashinfer(root)
                columns["flags and variables"] = _or_undetermined(
                    lambda: options.check_kernels(root, self.kernels, candidate.queue)
                )
        release = candidate.release
        return ReleaseReport(
            candidate.name, release.filename, release.sha256, release.pinned, partner, requires, columns
        )

    def _calls_of_vllm(self, root: Path, requires: Mapping[str, str]) -> tuple[str, Column]:
        """Check a vLLM release with the FlashInfer that it requires; the pinned one if it names none."""
        component = self._component(FLASHINFER)
        if component is None or self.kernels is None:
            return "", NOT_APPLICABLE
        version = requires.get(str(component.package), component.version)
        try:
            if version == component.version:
                return f"{FLASHINFER}-{version}", self._calls(self.kernels, root, self._folder(component), component)
            with unpacked(upstream.release(self.table, component, version)) as other:
                return f"{FLASHINFER}-{version}", self._calls(self.kernels, root, other, component)
        except NetworkError as error:
            return "", undetermined(f"it requires {component.package} {version}: {error.what}, {error.why}")

    def _calls_of_flashinfer(self, root: Path) -> tuple[str, Column]:
        """Check a FlashInfer release with the vLLM that is pinned."""
        vllm, flashinfer = self._component(VLLM), self._component(FLASHINFER)
        if vllm is None or flashinfer is None or self.kernels is None:
            return "", NOT_APPLICABLE
        return f"{VLLM}-{vllm.version}", self._calls(self.kernels, self._folder(vllm), root, flashinfer)

    def _calls(self, kernels: KernelTable, vllm: Path, flashinfer: Path, pinned: Component) -> Column:
        packages = [Package(folder) for folder in (vllm, flashinfer, self._folder(pinned))]
        return _or_undetermined(lambda: calls.check(kernels, *packages))

    def _component(self, name: str) -> Component | None:
        """Return a component of the stack; None if it has none of that name."""
        return self.table.stack(self.stack).components.get(name)

    def _folder(self, component: Component) -> Path:
        """Return a folder with the pinned release of a component."""
        release: Release = upstream.release(self.table, component)
        if release.sha256 not in self._pinned:
            self._pinned[release.sha256] = self.folders.enter_context(unpacked(release))
        return self._pinned[release.sha256]

    def _answers(
        self, root: Path, judgements: Sequence[Judgement], contents: Mapping[str, Content]
    ) -> tuple[ReleaseAnswer, ReleaseAnswer]:
        """Run a vLLM release unpatched, then with the queue's files."""
        if self.python is None:
            undetermined = ReleaseAnswer(refusal=self.why_static, profiles=self.why_static)
            return undetermined, undetermined
        stock = experts.ask(self.python, root, self.profiles)
        if conflicts := [entry.patch.name for entry in judgements if entry.verdict is Verdict.CONFLICTS]:
            return stock, ReleaseAnswer(refusal=f"it does not apply ({', '.join(conflicts)})")
        for path, content in contents.items():
            if content is None:
                (root / path).unlink(missing_ok=True)
            else:
                write_atomic(root / path, content)
        return stock, experts.ask(self.python, root, {})


def _or_undetermined(look: Callable[[], Column]) -> Column:
    """Return a column; undetermined if a file of the release cannot be read, for example for newer Python syntax."""
    try:
        return look()
    except (InputError, DocumentError, OSError) as error:
        return undetermined(f"{error.what}: {error.why}" if isinstance(error, SparkforgeError) else str(error))


def _patches(judgements: Sequence[Judgement]) -> Column:
    """Return the verdicts on a queue; the summary counts them."""
    counts = {verdict: sum(entry.verdict is verdict for entry in judgements) for verdict in Verdict}
    labels = {Verdict.APPLIES: "apply", Verdict.OFFSET: "offset", Verdict.UPSTREAM: "upstream",
             Verdict.CONFLICTS: "conflict"}  # fmt: skip
    summary = ", ".join(f"{count} {labels[verdict]}" for verdict, count in counts.items() if count)
    observations = []
    for entry in judgements:
        text = f"{entry.patch.name}: {entry.verdict.value}" + (f" ({entry.evidence})" if entry.evidence else "")
        places = [f"{misfit.path}:{misfit.line}" for misfit in entry.misfits]
        observations.append(
            Observation(EFFECTS[entry.verdict], " at ".join([text, ", ".join(places)][: 1 + bool(places)]))
        )
    return Column(summary, tuple(observations))


def check_stack(
    stack: str, against: Sequence[str] = (), *, python: str = "", static: bool = False, as_json: bool = False
) -> bool:
    """Check the releases in `against`, or the newest ones; print the report and return whether all can move.

    `python` has torch and vLLM's dependencies; with `static` no code of a release is run. Raises UsageError for a
    `python` that cannot be run, InputError for an unknown stack or upstream, NetworkError without a network,
    StorageError while another process checks, and the errors of unpacking.
    """
    table = pins.load()
    check = StackCheck.of(table, stack, python, static=static)
    releases = candidates(table, stack, against, PATCHES)
    steps, rows = Steps(len(releases)), list[ReleaseReport]()
    folder = work_folder()
    with locked(folder.with_suffix(".lock"), "check upstream releases"), check.folders:
        remove(folder)
        for candidate in releases:
            with steps.step(candidate.name, str(candidate.release)) as update:
                rows.append(check.run(candidate))
                update("can move" if rows[-1].can_move else "cannot move")
    result = CheckReport(stack, datetime.now(UTC).date().isoformat(), tuple(rows))
    if as_json:
        echo_json(result.document())
    else:
        echo(result.text())
    return result.can_move


def _interpreter(python: str) -> Path | None:
    """Return the interpreter that runs releases: the given one, or the embedded device's if it exists.

    Raises UsageError if the given interpreter cannot be run.
    """
    if python:
        if not os.access(python, os.X_OK) or Path(python).is_dir():
            raise UsageError(f"--python {python} cannot be run", "it is no program", "name an interpreter with torch")
        return Path(python)
    return next((env.python for env in (Environment(stack_of(EMBEDDED)), TEST) if env.python.is_file()), None)
