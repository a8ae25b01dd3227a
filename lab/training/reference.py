"""Measures the tiny checkpoint's reference: its score on the gate's text in float32 on the CPU.

`.sparkforge/envs/test/bin/python -m lab.training.reference` prints the `reference` of its row in
sparkforge/bench/baselines.toml. The model is lab/training/model.py with the committed weights, without vLLM.
"""

from __future__ import annotations

import hashlib
import math
import sys

import numpy as np

from lab.training import corpus, export, faults
from sparkforge.core.console import echo
from sparkforge.models import tiny


def scored() -> corpus.Corpus:
    """Return the gate's text as rows of the stored vocabulary, without the training data."""
    rows = export.unpack()[1]
    row = {token: number for number, token in enumerate(rows.tolist())}
    text = corpus.HELD_OUT.read_text()
    held_out = np.array([row.get(token, 0) for token in corpus.harmony_encode()(text)], np.uint16)
    nothing = np.zeros(0, np.uint16)
    return corpus.Corpus(rows, nothing, nothing, nothing.astype(bool), held_out, len(text.encode()))


def main() -> int:
    """Measure and print; return the exit code."""
    text = scored()
    bits = faults.bits_per_byte(export.unpack()[0].eval(), text)
    chunks = -(-len(text.held_out) // corpus.CHUNK)  # the first token of each is unscored
    figures = (
        f"nats = {bits * math.log(2) * text.held_out_bytes:.2f}, "
        f"tokens = {len(text.held_out) - chunks}, size = {text.held_out_bytes}"
    )
    sha256 = hashlib.sha256(tiny.FILE.read_bytes()).hexdigest()
    echo(f'{{ precision = "float32", {figures}, weights_sha256 = "{sha256}" }}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
