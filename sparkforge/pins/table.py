"""`pins.toml`: every external input with its version, hash, size, licence and reason. The only reader of that file.

A pin without a hash or a size, with an unknown key, or listed twice is refused; other modules do not check again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from sparkforge.core.errors import InputError
from sparkforge.core.files import DocumentError, read_toml
from sparkforge.core.paths import ROOT
from sparkforge.core.tables import Record

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
GitHash = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|unknown)$")]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Size = Annotated[int, Field(gt=0, strict=True)] | Literal["unknown"]  # bytes

RESTORE = "git checkout pins.toml   # or correct it"
COMMIT = re.compile(r"[0-9a-f]{40}")


class PinnedFile(Record):
    """One file of a package: its hash, and its size in bytes, at which a download stops."""

    sha256: Sha256
    size: Size


class Component(Record):
    """One external input: the files of a package, or an image by digest."""

    version: Text
    kind: Literal["sdist", "wheel", "image"]
    licence: Text
    why: Text
    source: Text | None = None  # the source of the hash, if not the file itself
    package: Text | None = None
    pinned_files: dict[Text, PinnedFile] = Field(default_factory=dict, alias="files")
    image: Text | None = None
    digest: Digest | None = None
    size: Size | None = None  # for an image; each file of a package has its own
    patches: Text | None = None  # folder under patches/
    index: Text | None = None  # for a wheel that the default package index lacks: see sources/fetch.py
    provides: Text | None = None  # a further NAME==VERSION for importlib.metadata

    @model_validator(mode="after")
    def _has_hash_and_size(self) -> Component:
        if self.kind == "image":
            if not (self.image and self.digest and self.size) or self.pinned_files or self.package:
                raise ValueError("an image needs 'image', 'digest' and 'size', and no key of a package")
        elif not (self.package and self.pinned_files) or self.image or self.digest or self.size:
            raise ValueError("a package needs 'package' and at least one file with its sha256 and size")
        if self.provides and self.provides.partition("==")[2].partition("+")[0] != self.version:
            raise ValueError(f"'provides' must be NAME=={self.version}, with or without a local version")
        return self

    @property
    def files(self) -> dict[str, str]:
        """The sha256 of each file by name."""
        return {name: file.sha256 for name, file in self.pinned_files.items()}

    def size_of(self, filename: str) -> int | None:
        """Return the size of a file in bytes; None if it is unknown in pins.toml."""
        size = self.pinned_files[filename].size
        return None if size == "unknown" else size


class GitSource(Record):
    """A git repository that an upstream's build fetches itself unless a variable names a copy.

    `of` is the component whose files request it, `asked_in` the file, `dependency` its name there, and `tag` the tag or
    commit that upstream writes. `commit` and `tree` are SHA-1 ids, or `unknown`; a tag alone could move.
    """

    of: Text
    asked_in: Text
    dependency: Text
    repository: Text
    tag: Text
    commit: GitHash
    tree: GitHash
    size: Size  # of the commit's download; git does not report it, so it is `unknown` until it is measured
    licence: Text
    needed: bool  # by gpt-oss on compute capability 12.1
    why: Text  # why it is needed, or why not
    src_dir: Text | None = None  # the variable that names a copy for upstream's build
    switch: Text | None = None  # the setting that leaves it out of the build without a patch
    source: Text | None = None  # the source of the commit, if not upstream's own file

    @model_validator(mode="after")
    def _commit_is_upstreams(self) -> GitSource:
        if COMMIT.fullmatch(self.tag) and self.commit != self.tag:
            raise ValueError("upstream requests a commit, and 'commit' is a different one")
        if not COMMIT.fullmatch(self.tag) and self.commit != "unknown" and not self.source:
            raise ValueError("upstream requests a tag: 'source' must name the source of its commit")
        return self


class StackImage(Record):
    """The inputs of a stack's container image in addition to its components; a native build has the same kernels.

    `device` names the Debian packages, the trimming table and the stages of the image; `locks` maps a processor (as
    `uname -m` prints it) to a hash-locked set; `kernels` is a set of the stack's kernel table, compiled for
    `architecture`; `environments` names the default environments in which "kernels" and "vllm" are compiled.
    """

    device: Literal["cpu", "cuda"]
    locks: dict[Text, Text] = Field(min_length=1)
    architecture: str = ""
    kernels: str = ""
    environments: dict[Literal["kernels", "vllm"], Text] = Field(default_factory=dict)

    def lock(self, processor: str) -> str:
        """Return the locked set for a processor. Raises InputError if the image is not made for it."""
        if processor not in self.locks:
            why, fix = f"pins.toml has a lock for {', '.join(self.locks)}", f"again   # on {next(iter(self.locks))}"
            raise InputError(f"this stack's image is not made for {processor}", why, fix, code="input.pins")
        return self.locks[processor]


class Stack(Record):
    """A set of components that build one runtime, the git sources of their builds, and the inputs of the image."""

    summary: Text
    components: dict[Text, Component] = Field(min_length=1)
    git: dict[Text, GitSource] = Field(default_factory=dict)
    image: StackImage | None = None

    @model_validator(mode="after")
    def _git_sources_belong(self) -> Stack:
        if strays := sorted(name for name, pin in self.git.items() if pin.of not in self.components):
            raise ValueError(f"'of' names no component of this stack: {', '.join(strays)}")
        return self


class EnvironmentPin(Record):
    """The inputs of a Python environment under the checkout's state (sparkforge/environments.py)."""

    lock: Text  # a hash-locked set
    wheels: tuple[Text, ...] = ()  # STACK/COMPONENT, fetched by their pins; added if the lock lacks them
    project: bool = False  # also installs this checkout, editable
    library: Text | None = None  # requirement of spark-mxfp4, whose wheel is built from this checkout
    copy_files: bool = Field(False, alias="copy")  # instead of hard links into uv's cache
    size: int = Field(gt=0, strict=True)  # bytes of free space that are required: installation and downloads


class TextPin(Record):
    """A text that the accuracy gate scores: a member of a zip archive in a dataset of the Hugging Face hub."""

    dataset: Text
    revision: Text = Field(pattern=r"^[0-9a-f]{40}$")
    archive: Text
    member: Text
    pinned_files: dict[Text, PinnedFile] = Field(alias="files")  # the archive and the member
    licence: Text
    why: Text
    source: Text

    @model_validator(mode="after")
    def _archive_and_member_have_pins(self) -> TextPin:
        if self.pinned_files.keys() != {self.archive, self.member}:
            raise ValueError("'files' must have the archive and the member, and nothing else")
        if any(file.size == "unknown" for file in self.pinned_files.values()):
            raise ValueError("a text needs sizes, which limit its download and unpacking")
        return self


class Pins(Record):
    """The whole table: stacks, environments and texts by name.

    `default` is the stack of commands without --stack; `devices` maps a device with another stack to that stack.
    """

    schema_: Literal[1] = Field(alias="schema")
    default: Text
    devices: dict[Text, Text] = Field(default_factory=dict)
    stacks: dict[Text, Stack] = Field(min_length=1)
    environments: dict[Text, EnvironmentPin] = Field(default_factory=dict)
    texts: dict[Text, TextPin] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Pins:
        seen: dict[str, str] = {}
        for component in self.components():
            for name, sha256 in component.files.items():
                if seen.setdefault(name, sha256) != sha256:
                    raise ValueError(f"{name} is pinned with two different hashes")
        if unknown := sorted({self.default, *self.devices.values()} - self.stacks.keys()):
            raise ValueError(f"'default' or 'devices' names no stack: {', '.join(unknown)}")
        known = {f"{stack}/{name}" for stack, table in self.stacks.items() for name in table.components}
        wheels = {wheel for environment in self.environments.values() for wheel in environment.wheels}
        if unknown := sorted(wheels - known):
            raise ValueError(f"'wheels' of an environment names no component: {', '.join(unknown)}")
        return self

    def components(self) -> Iterator[Component]:
        """Every component of every stack."""
        for stack in self.stacks.values():
            yield from stack.components.values()

    def stack(self, name: str) -> Stack:
        """Return one stack. Raises InputError, which lists the known stacks."""
        if name not in self.stacks:
            raise _absent(f"there is no stack {name}", self.stacks, f"--stack {self.default}")
        return self.stacks[name]

    def image(self, stack: str) -> StackImage:
        """Return the inputs of a stack's image. Raises InputError for an unknown stack, or one without an image."""
        image = self.stack(stack).image
        if image is None:
            built = ", ".join(name for name, table in self.stacks.items() if table.image)
            why = f"pins.toml has no table [stacks.{stack}.image]; there are images of {built}"
            raise InputError(f"the stack {stack} has no image", why, f"--stack {self.default}", code="input.pins")
        return image

    def environment(self, name: str) -> EnvironmentPin:
        """Return the inputs of an environment. Raises InputError for an unknown name."""
        if name not in self.environments:
            raise _absent(f"there is no environment {name}", self.environments)
        return self.environments[name]

    def component(self, stack: str, name: str) -> Component:
        """Return one component. Raises InputError for an unknown name."""
        try:
            return self.stacks[stack].components[name]
        except KeyError:
            known = self.stacks[stack].components if stack in self.stacks else self.stacks
            raise _absent(f"nothing is pinned as {stack}/{name}", known) from None


def _absent(failure: str, known: Iterable[str], fix: str = "less pins.toml   # add it there") -> InputError:
    return InputError(failure, f"pins.toml has {', '.join(known) or 'none'}", fix, code="input.pins")


def load(path: Path = ROOT / "pins.toml") -> Pins:
    """Read and check the table. Raises InputError, which names every invalid entry."""
    try:
        return Pins.model_validate(read_toml(path))
    except FileNotFoundError:
        raise InputError(f"cannot read {path}", "it is not there", RESTORE, code="input.pins") from None
    except DocumentError as error:  # includes a repeated key
        raise InputError(f"{path.name} is not valid TOML", str(error), RESTORE, code="input.pins") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InputError(f"{path.name} is refused", problems, RESTORE, code="input.pins") from None
