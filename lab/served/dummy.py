"""Write the folder of a gpt-oss model of real size without weights.

`python -m lab.served.dummy OUT --size 120b`. The folder is for `--load-format dummy`: configuration and tokenizer are
complete, and the server makes up the weights. The model is for measurements of speed; its answers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge.core.console import say
from sparkforge.core.errors import UsageError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.core.program import exit_code
from sparkforge.models import recipes, tiny
from sparkforge.models.harmony import tokenizer_files

# The settings that differ from the tiny model's, from sparkforge/recipes.
SIZES: Mapping[str, Mapping[str, Any]] = {size: recipes.load()[f"gpt-oss-{size}"].config for size in ("20b", "120b")}


def config(size: str) -> dict[str, Any]:
    """Return config.json of openai/gpt-oss-`size`; raises UsageError for a size that is not in SIZES."""
    if size not in SIZES:
        raise UsageError(f"there is no gpt-oss of size {size!r}", f"choose from {', '.join(SIZES)}", "name one of them")
    own = tiny.config(tiny.sizes())
    top_k = SIZES[size]["num_experts_per_tok"]
    merged = {**own, **SIZES[size], "experts_per_token": top_k, "quantization_config": own["quantization_config"]}
    return {**merged, "layer_types": ["sliding_attention", "full_attention"] * (merged["num_hidden_layers"] // 2)}


def write_dummy(directory: Path, size: str) -> Path:
    """Write configuration and tokenizer into `directory` and return it."""
    wanted = config(size)
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in tokenizer_files().items():
        write_atomic(directory / name, data)
    write_json(directory / "config.json", wanted)
    return directory


def main(arguments: Sequence[str]) -> int:
    """Write the folder that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.served.dummy", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="120b", help=", ".join(SIZES))
    options = parser.parse_args(arguments)
    return exit_code(lambda: say(f"gpt-oss-{options.size} without weights: {write_dummy(options.out, options.size)}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
