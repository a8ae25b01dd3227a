"""The run side's commands that are not in `tasks.py`: thin Invoke tasks, as there."""

from __future__ import annotations

from importlib import import_module as room  # a module is loaded only by the task that needs it

from invoke.context import Context

from sparkforge.command import verb


@verb(
    log="a log to look at instead of ours; - is stdin",
    state="a state folder, if not this checkout's .sparkforge",
    json_="print the findings as JSON",
    bundle="write a redacted support archive, such as support.tar.gz",
)
def doctor(_ctx: Context, log: str = "", state: str = "", json_: bool = False, bundle: str = "") -> None:
    """Say what is wrong, why, and the next command: from logs, validation, builds, engine and machine."""
    room("serve.doctor").main(log=log, state=state, as_json=json_, bundle=bundle)


@verb(
    model="gpt-oss-120b, gpt-oss-20b, tiny-gpt-oss, a folder of a checkpoint, or a config.json",
    device="spark, h200, rtx-pro-6000, rtx-5090, or this: the machine that you are on",
    context="tokens a sequence, prompt and answer; default 8192, or what the device's profiles take",
    concurrency="sequences at once; default 4",
    kv_dtype="type of the KV cache: auto, bf16 or fp8",
    resident="GB that the system and other programs keep in use; default: the device's, measured for this",
    json_="print the plan as JSON",
)
def plan(
    _ctx: Context,
    model: str,
    device: str = "spark",
    context: str = "",
    concurrency: str = "",
    kv_dtype: str = "auto",
    resident: str = "",
    json_: bool = False,
) -> None:
    """Compute what a model needs of a device's memory, what fits, how fast it can be, and the serve profile for it."""
    words = {"model": model, "device": device, "resident": resident}
    words |= {"context": context, "concurrency": concurrency, "kv_dtype": kv_dtype}
    known, profiles = room("serve.models").load(), room("serve.profiles").load()
    room("validate.plan_screen").show(words, known, profiles, as_json=json_)
