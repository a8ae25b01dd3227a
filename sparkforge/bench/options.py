"""The options of the commands that gate, load and submit, for `./inv` and for `python -m sparkforge.bench`."""

from __future__ import annotations

HUB = "hub"  # for --fetch-text: the Hugging Face hub, or the URL in HF_ENDPOINT
# Option → its default and help. The upper-case name in brackets is the environment variable with the same meaning.
OPTIONS: dict[str, tuple[str | bool, str]] = {
    "model": ("", "as the server names it; default: the only one it serves [MODEL]"),
    "port": ("", "port on this machine; default: where ./inv up serves, or 8000 [PORT]"),
    "url": ("", "the server, if it is not on this machine"),
    "tp": ("", "GPUs that share the model; default 1 [TP]"),
    "isl": ("", "tokens in; with --osl: every concurrency of this shape [ISL]"),
    "osl": ("", "tokens out [OSL]"),
    "conc": ("", "requests at once; with --isl --osl also a list, 4,8,16 [CONC]"),
    "max_model_len": ("", "longest sequence; default: the server's own [MAX_MODEL_LEN]"),
    "random_range_ratio": ("", "spread of lengths, 0.0 is fixed [RANDOM_RANGE_RATIO]"),
    "num_prompts": ("", "default: ten times the concurrency [NUM_PROMPTS]"),
    "result_filename": ("", "of a single configuration [RESULT_FILENAME]"),
    "warmups": ("", "requests before the clock starts; default: twice the concurrency"),
    "seed": ("", "of the prompts; default 0"),
    "text": (
        "",
        "text that the gate scores: a name or a file; default: the model's own (see bench.acc)",
    ),
    "silence": ("", "seconds without a token until a request counts as failed; default 600"),
    "limit": ("", "seconds until a load counts as failed; default 7200"),
    "output": ("", "folder for results; default .sparkforge/bench"),
    "fresh": (False, "begin a new batch even where one was killed"),
    "fetch_text": ("", f"first fetch the text that gpt-oss is scored on: {HUB}, or a file that has it"),
    "record": (False, "measure, and print the row to add as this model's threshold"),
    "to": ("", "where to post: a URL, or board for the competition's; without it nothing leaves this machine"),
    "form": ("", "json, or the competition's gradio; default json, for --to board gradio"),
    "result": ("", "post this result, run nothing"),
    "profiles": ("", "serve profiles, separated by commas: each is started, gated, loaded and stopped"),
    "device": ("auto", "with --profiles: auto, embedded, docker or docker-cpu, as with ./inv up"),
    "stack": ("", "with --profiles: a stack of pins.toml; default: the device's"),
    "replace": (False, "with --profiles: first stop this checkout's running server"),
}
START = ("profiles", "device", "stack", "replace")
SERVER = ("model", "port", "url", "silence", "text", "output")
SHAPE = ("tp", "isl", "osl", "conc", "max_model_len", "random_range_ratio", "num_prompts", "result_filename")
ACCURACY = (*SERVER, *SHAPE, "fetch_text", "record")
LOAD = (*SERVER, *SHAPE, "warmups", "seed", "limit", "fresh")
SUBMIT = (*LOAD, "to", "form", "result")
