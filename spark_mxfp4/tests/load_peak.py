"""Load a packed checkpoint for a kernel with its own layout; print bytes: one packed layer, peak, end, all layers.

Weights are copied out of the mapped file, as in loading to a GPU. Only anonymous memory counts, because the kernel can
drop the file's pages.
"""

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path

from transformers import core_model_loading

import packed_checkpoint
from spark_mxfp4 import hf

LAYERS, EXPERTS = 6, 32
SIZES = {
    "vocab_size": 64, "hidden_size": 512, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 1,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def anonymous():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.ended = 0, False

    def run(self):
        while not self.ended:
            self.most = max(self.most, anonymous())
            time.sleep(0.0002)


materialize = core_model_loading._materialize_copy
core_model_loading._materialize_copy = lambda *arguments, **options: materialize(*arguments, **options).clone()
folder, kernel = Path(sys.argv[1]), sys.argv[2]
for name, layers, experts in (("small", 1, 2), ("large", LAYERS, EXPERTS)):
    (folder / name).mkdir()
    sizes = {**SIZES, "num_hidden_layers": layers, "num_local_experts": experts}
    layer = packed_checkpoint.write(folder / name, **sizes)
hf.load_packed(str(folder / "small"), kernel, device="cpu")  # imports everything
gc.collect()
trim = ctypes.CDLL(None).malloc_trim  # freed memory goes back to the system
trim(0)
start, peak = anonymous(), Peak()
peak.start()
model = hf.load_packed(str(folder / "large"), kernel, device="cpu")
peak.ended = True
peak.join()
gc.collect()
trim(0)
print(layer, peak.most - start, anonymous() - start, layer * LAYERS)
