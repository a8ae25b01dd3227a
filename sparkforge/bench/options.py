"""The options of the commands that gate, load and submit: `options.toml`, whose head explains the keys."""

import tomllib
from pathlib import Path
from typing import NamedTuple

HUB = "hub"  # for --fetch-text: the Hugging Face hub, or the URL in HF_ENDPOINT


class Option(NamedTuple):
    """One option."""

    help: str
    variable: str = ""
    default: str = ""
    flag: bool = False

    @property
    def help_text(self) -> str:
        """The help text, with the environment variable that sets the same option."""
        return f"{self.help} [{self.variable}]" if self.variable else self.help


_TABLE = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
OPTIONS: dict[str, Option] = {name: Option(**row) for name, row in _TABLE["options"].items()}
COMMANDS: dict[str, tuple[str, ...]] = {name: tuple(names) for name, names in _TABLE["commands"].items()}
