"""The configurations to run: from flags, else environment variables (the gpt-oss competition's), else defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparkforge.bench import context
from sparkforge.bench.baselines import Baselines
from sparkforge.bench.options import OPTIONS
from sparkforge.bench.schema import Config
from sparkforge.core.errors import UsageError
from sparkforge.core.openai import Endpoint
from sparkforge.core.program import parse_whole

MAX_VALUE = 10**9  # upper limit of lengths and counts
PORT = 8000  # of ./inv up
PROMPTS_PER_SLOT = 10  # the competition's NUM_PROMPTS = CONC * 10
WARMUPS_PER_SLOT = 2  # and its --num-warmups = 2 * CONC
FIXED_BEFORE = 1.0  # the value for a fixed length in older benchmark programs; vLLM now takes a spread below 1


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a command, as text; `flags` override `environment`."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def text(self, name: str) -> str:
        """Return a setting: its flag, else its environment variable, else its default."""
        option = OPTIONS[name]
        return str(self.flags.get(name) or self.environment.get(option.variable) or option.default)

    def number(self, name: str, least: int = 1, most: int = MAX_VALUE) -> int:
        """Return a setting as a whole number from `least` to `most`. Raises UsageError."""
        label = f"--{name.replace('_', '-')}" if self.flags.get(name) else OPTIONS[name].variable
        return parse_whole(self.text(name), label, least, most)

    def share(self) -> float:
        """Return the spread of lengths, 0 for fixed. Raises UsageError."""
        text = self.text("random_range_ratio")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if value == FIXED_BEFORE:
            return 0.0
        if not 0 <= value < 1:
            why = "it is a spread of lengths, from 0 (fixed) to below 1"
            raise UsageError(f"RANDOM_RANGE_RATIO={text} has no meaning", why, "RANDOM_RANGE_RATIO=0.0")
        return value

    @property
    def is_batch(self) -> bool:
        """Whether flags give a shape, so that all its concurrencies are run."""
        return bool(self.flags.get("isl") and self.flags.get("osl"))

    def concurrencies(self, baselines: Baselines) -> list[int]:
        """Return the concurrencies to run: for a batch --conc's list or the table's row, else the single setting.

        Raises UsageError for an invalid number or a shape without a row.
        """
        if not self.is_batch:
            return [self.number("conc")]
        if listed := self.flags.get("conc"):
            return [parse_whole(part.strip(), "--conc", 1, MAX_VALUE) for part in listed.split(",") if part.strip()]
        return baselines.concurrencies(self.number("isl"), self.number("osl"))


def endpoint(settings: BenchSettings) -> Endpoint:
    """Return the endpoint of --url, or of PORT on this machine, with its model; our own server's also has its key.

    Raises UsageError for an invalid setting, ServerError for a server that does not answer.
    """
    if not (url := settings.text("url")):
        own = None if settings.text("port") else context.running_server()  # this checkout's server
        port = own.port if own else settings.number("port", most=65535) if settings.text("port") else PORT
        url = f"http://127.0.0.1:{port}"
    base = url.rstrip("/").removesuffix("/v1")
    server = Endpoint(base, settings.text("model"), settings.number("silence"))
    if not server.key and (own := context.own_server(server)):
        server = replace(server, key=own.key)
    return replace(server, model=server.served().name)


def configs(settings: BenchSettings, baselines: Baselines, server: Endpoint) -> list[Config]:
    """Return the configurations to run. Raises UsageError if a shape does not fit the model's length."""
    longest = settings.number("max_model_len", 0) or server.served().max_model_len
    isl, osl, share = settings.number("isl"), settings.number("osl"), settings.share()
    needed = round(isl * (1 + share)) + round(osl * (1 + share))
    if longest and needed > longest:
        why = f"the model takes {longest} in total" + (f" and lengths vary by {share:.0%}" if share else "")
        fix = "--help   # choose a smaller --isl or --osl, or serve with a larger --max-model-len"
        raise UsageError(f"{isl} + {osl} tokens do not fit", why, fix)
    prompts = 0 if settings.is_batch and not settings.flags.get("num_prompts") else settings.number("num_prompts", 0)
    shared: dict[str, Any] = {
        "model": server.model, "url": server.url, "tp": settings.number("tp"), "isl": isl, "osl": osl,
        "max_model_len": longest or needed, "random_range_ratio": share, "seed": settings.number("seed", 0),
    }  # fmt: skip
    warmups = settings.number("warmups", 0) if settings.text("warmups") else None
    rows = []
    for conc in settings.concurrencies(baselines):
        asked = conc * WARMUPS_PER_SLOT if warmups is None else warmups
        rows.append(Config(**shared, conc=conc, num_prompts=prompts or conc * PROMPTS_PER_SLOT, warmups=asked))
    return rows
