"""`pins.toml`: every outside input with its version, hash, licence and reason. The only reader of that file.

A pin without a hash, with an unknown key, or standing twice is refused; nothing downstream ever checks again.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from sparkforge.errors import PinError
from sparkforge.paths import ROOT

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
GitHash = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|unknown)$")]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


COMMIT = re.compile(r"[0-9a-f]{40}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(_Strict):
    """One outside input: a registry package's files, or an image by digest."""

    version: Text
    kind: Literal["sdist", "wheel", "image"]
    licence: Text
    why: Text
    source: Text | None = None  # where the hash was read, if not from the file itself
    package: Text | None = None
    files: dict[Text, Sha256] = Field(default_factory=dict)
    image: Text | None = None
    digest: Digest | None = None
    patches: Text | None = None  # folder under patches/

    @model_validator(mode="after")
    def _has_a_hash(self) -> Component:
        if self.kind == "image":
            if not (self.image and self.digest) or self.files or self.package:
                raise ValueError("an image needs 'image' and 'digest' and nothing of a package")
        elif not (self.package and self.files) or self.image or self.digest:
            raise ValueError("a package needs 'package' and at least one file with its sha256")
        return self


class GitSource(_Strict):
    """A git repository that an upstream's build fetches by itself unless it is told of a copy.

    `of` names the component whose files ask for it, `asked_in` the file, `dependency` the name it has there, and `tag`
    what upstream writes. `commit` and `tree` are SHA-1 names, or `unknown`: said, because a tag can be moved.
    """

    of: Text
    asked_in: Text
    dependency: Text
    repository: Text
    tag: Text
    commit: GitHash
    tree: GitHash
    licence: Text
    needed: bool  # by gpt-oss on compute capability 12.1
    why: Text  # or why not
    src_dir: Text | None = None  # the variable with which upstream takes a copy
    switch: Text | None = None  # what leaves it out of the build without a patch
    source: Text | None = None  # where the commit was read, if not in upstream's own file

    @model_validator(mode="after")
    def _commit_is_upstreams(self) -> GitSource:
        if COMMIT.fullmatch(self.tag) and self.commit != self.tag:
            raise ValueError("upstream asks for a commit, and 'commit' is another one")
        if not COMMIT.fullmatch(self.tag) and self.commit != "unknown" and not self.source:
            raise ValueError("upstream asks for a tag: 'source' must say where its commit was read")
        return self


class Stack(_Strict):
    """A set of components that build one runtime, and what their builds fetch by git."""

    summary: Text
    components: dict[Text, Component] = Field(min_length=1)
    git: dict[Text, GitSource] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _git_sources_belong(self) -> Stack:
        if strays := sorted(name for name, pin in self.git.items() if pin.of not in self.components):
            raise ValueError(f"'of' names no component of this stack: {', '.join(strays)}")
        return self


class Pins(_Strict):
    """The whole table: stacks by name."""

    schema_: Literal[1] = Field(alias="schema")
    stacks: dict[Text, Stack] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_hash_a_file(self) -> Pins:
        seen: dict[str, str] = {}
        for component in self.components():
            for name, sha256 in component.files.items():
                if seen.setdefault(name, sha256) != sha256:
                    raise ValueError(f"{name} is pinned with two different hashes")
        return self

    def components(self) -> Iterator[Component]:
        """Every component of every stack."""
        for stack in self.stacks.values():
            yield from stack.components.values()

    def stack(self, name: str) -> Stack:
        """Return one stack. Raises PinError naming the known ones."""
        if name not in self.stacks:
            known, first = ", ".join(self.stacks), next(iter(self.stacks))
            raise PinError(f"there is no stack {name}", f"pins.toml has {known}", f"name one of them: --stack {first}")
        return self.stacks[name]

    def component(self, stack: str, name: str) -> Component:
        """Return one component. Raises PinError if there is none of that name."""
        try:
            return self.stacks[stack].components[name]
        except KeyError:
            known = ", ".join(self.stacks[stack].components if stack in self.stacks else self.stacks)
            raise PinError(
                f"nothing is pinned as {stack}/{name}", f"pins.toml has {known}", "add it to pins.toml"
            ) from None


def load(path: Path = ROOT / "pins.toml") -> Pins:
    """Read and check the table. Raises PinError naming every entry that is wrong."""
    try:
        return Pins.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise PinError(f"cannot read {path}", "it is not there", "git checkout pins.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:  # includes a key that stands twice
        raise PinError(f"{path.name} is no valid TOML", str(error), f"correct {path}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise PinError(f"{path.name} is refused", wrong, f"correct {path}") from None
