"""The effect of a release on one part of a stack."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Effect(Enum):
    """From harmless to fatal; the values are those of the JSON report."""

    NONE = "none"
    CHANGED = "changed"  # routine work in pins.toml, a table or the queue; nothing to decide
    UNKNOWN = "not determined"
    BREAKS = "breaks"

    @property
    def mark(self) -> str:
        """The sign before a cell of the table."""
        return {"none": "✓", "changed": "~", "not determined": "?", "breaks": "✗"}[self.value]

    @property
    def allows_move(self) -> bool:
        """Whether the stack can move to the release as far as this part is concerned."""
        return self in (Effect.NONE, Effect.CHANGED)


@dataclass(frozen=True)
class Observation:
    """One effect of a release, and its severity."""

    effect: Effect
    text: str


@dataclass(frozen=True)
class Column:
    """The effect of a release on one part: the worst effect, a few words for the table, and every observation."""

    summary: str
    observations: tuple[Observation, ...] = ()

    @property
    def effect(self) -> Effect:
        """The worst effect of all observations."""
        order = list(Effect)
        return max((entry.effect for entry in self.observations), key=order.index, default=Effect.NONE)

    def __str__(self) -> str:
        return f"{self.effect.mark} {self.summary}" if self != NOT_APPLICABLE else self.summary

    @property
    def reasons(self) -> list[str]:
        """The observations that forbid a move."""
        return [entry.text for entry in self.observations if not entry.effect.allows_move]


NOT_APPLICABLE = Column("n/a")


def undetermined(why: str) -> Column:
    """Return the column of a part that could not be checked."""
    return Column("not determined", (Observation(Effect.UNKNOWN, why),))
