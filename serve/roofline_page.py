"""The Spark's roofline by serve profile for docs/performance.md: `python3 -m serve.roofline_page` writes it there.

Computed by `validate/`, from cited figures; a test holds the page to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve import models, profiles
from sparkforge.files import write_atomic
from sparkforge.paths import ROOT
from validate import architecture, budget, devices, roofline
from validate.architecture import Architecture
from validate.budget import Load
from validate.choose import Profile
from validate.devices import GIB, Device

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by python3 -m serve.roofline_page -->", "<!-- end of what it made -->"
MODEL, DEVICE = "gpt-oss-120b", "spark"
TOKENS = (1, 4, 16, 64, 256)  # of the experts' table
BEHIND = 1024  # tokens behind each sequence, beside --max-model-len
PIECE = 8192  # tokens a sequence in the last table


def text() -> str:
    """Return what stands between the markers: experts, decode, prefill and memory, each a table."""
    model = architecture.parse(models.load()[MODEL].config, MODEL)
    device = devices.choose(DEVICE)
    flags = {name: _profile(name) for name in device.profiles}
    tables = (_experts(model, device), _decode(model, device, flags), _prefill(model, device, flags))
    return "\n\n".join([BEGIN, *tables, _memory(model, device, flags), END])


def replaced(page: str) -> str:
    """Return the page with what stands between the markers made anew. Raises ValueError if they are not there."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE.name} lacks the markers {BEGIN} and {END}")
    return before + text() + after


def _profile(name: str) -> Profile:
    found = profiles.named(name)
    return Profile(about=found.about, words=found.words(), variables=found.variables())


def _experts(model: Architecture, device: Device) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        """A row a number of tokens: weights of the experts that they touch, over the memory's bandwidth."""
        for tokens in TOKENS:
            hit = roofline.experts_touched(model.experts, model.top_k, tokens)
            layer = hit * model.expert_bytes
            seconds = layer / (device.bytes_a_second or 1.0)
            times = (f"{seconds * 1e6:,.0f}", f"{seconds * model.layers * 1e3:.1f}")
            yield (str(tokens), f"{hit:.1f}", f"{layer / 1e6:,.0f}", *times)

    heads = ("tokens", "experts hit", "MB a layer", "µs a layer, at least", f"ms for {model.layers} layers, at least")
    return _table(heads, rows(), 0)


def _decode(model: Architecture, device: Device, flags: dict[str, Profile]) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        """Four rows a profile: one, four and all users BEHIND tokens deep, and one user at the longest context."""
        for name, profile in flags.items():
            longest, together = profile.longest(model.longest), profile.load(Load(1, 1)).sequences
            for batch, behind in ((1, BEHIND), (4, BEHIND), (together, BEHIND), (1, longest)):
                took = roofline.time(roofline.decode(model, batch, behind, "bf16", "bf16"), device)
                seconds = took.seconds or 1.0
                speeds = (f"{seconds * 1e3:.1f}", f"{1 / seconds:.1f}", f"{batch / seconds:,.1f}")
                yield (name, f"{batch}", f"{behind:,}", f"{took.work.bytes / 1e9:.1f}", *speeds, took.bound)

    heads = ("profile", "at once", "tokens behind each", "GB a step", "ms, at least", "tok/s each, at most", "all")
    return _table((*heads, "bound"), rows(), 1, words_last=True)


def _prefill(model: Architecture, device: Device, flags: dict[str, Profile]) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        """Three rows a profile: prompts of BEHIND, of PIECE and of the longest; the times of its steps add up."""
        for name, profile in flags.items():
            load = profile.load(Load(1, 1))
            for prompt in (BEHIND, PIECE, profile.longest(model.longest)):
                works = list(roofline.prefill(model, prompt, 1, load.batched, "bf16"))
                seconds = sum(roofline.time(work, device).seconds or 0.0 for work in works)
                bound = " and ".join(sorted({roofline.time(work, device).bound for work in works}))
                yield (
                    name,
                    f"{prompt:,}",
                    f"{load.batched:,}",
                    f"{seconds * 1e3:,.0f}",
                    f"{prompt / seconds:,.0f}",
                    bound,
                )

    heads = ("profile", "prompt", "tokens a step", "ms to first token, at least", "tok/s, at most", "bound")
    return _table(heads, rows(), 1, words_last=True)


def _memory(model: Architecture, device: Device, flags: dict[str, Profile]) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        """A row a profile: what its share leaves for keys and values, and how many sequences that holds."""
        for name, profile in flags.items():
            longest, share = profile.longest(model.longest), profile.number("--gpu-memory-utilization", 0)
            own = device.model_copy(update={"most": device.most.model_copy(update={"value": share})})
            load = profile.load(Load(PIECE, 1))
            lines = {line.name: line.bytes for line in budget.make(model, device, load).lines if line.share}
            cache = share * device.memory_bytes - sum(lines.values()) + lines["KV cache"]
            fitting = (budget.most_sequences(model, own, profile.load(Load(tokens, 1))) for tokens in (PIECE, longest))
            yield (name, f"{share:g}", f"{cache / GIB:.1f}", *(str(count) for count in fitting), f"{load.sequences}")

    heads = (
        "profile",
        "share",
        "GiB for the KV cache",
        f"sequences of {PIECE:,} tokens",
        "of --max-model-len",
        "let in",
    )
    return _table(heads, rows(), 1)


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]], words: int, *, words_last: bool = False) -> str:
    """Return a Markdown table; the first `words` columns, and the last one if `words_last`, hold words."""
    left = [index < words or (words_last and index == len(heads) - 1) for index in range(len(heads))]
    rule = " | ".join("---" if is_left else "---:" for is_left in left)
    return "\n".join(f"| {line} |" for line in (" | ".join(heads), rule, *(" | ".join(row) for row in rows)))


def main() -> None:
    """Write the page anew."""
    write_atomic(PAGE, replaced(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
