"""Commands about models: list, download and remove them, and compute a plan."""

import os
import shlex
from dataclasses import dataclass, replace

from invoke.context import Context

from sparkforge.cli.command import caller_path, name_or_path, option, task
from sparkforge.core.errors import UsageError


@task(example="./inv models", json_="print them as JSON")
def models(_ctx: Context, json_: bool = False) -> None:
    """List the families and recipes, with the evidence for each.

    ./inv plan, pull and up take a recipe's name.
    """
    from sparkforge.models import recipes

    recipes.report(as_json=json_)


@task(
    example="./inv pull gpt-oss-120b",
    repository="a recipe, or a repository such as openai/gpt-oss-120b",
    revision="a commit, tag or branch; default: the pinned one",
    to="the folder to write; default: models/NAME in the checkout, where Compose looks",
    mirror="folder with a copy of the repository, instead of the hub",
    replace="replace files in a folder that pull did not write, or that holds another model",
)
def pull(
    _ctx: Context, repository: str, revision: str = "", to: str = "", mirror: str = "", replace: bool = False
) -> None:
    """Download a checkpoint and check every hash.

    It fetches config.json first, and refuses a model of an unknown family before its weights. It fetches only the files
    that vLLM reads, and resumes interrupted ones.
    """
    from sparkforge.models import hub, local, recipes

    if "/" not in repository:
        recipe = recipes.named(repository)
        repository = recipe.repository or repository
    if not local.REPOSITORY.fullmatch(repository):
        why = "a repository is OWNER/NAME on the hub; a folder, or the tiny model, is served as it is"
        is_path = repository.startswith((".", "/", "~"))
        fix = f"./inv up --model {shlex.quote(repository)}" if is_path else "./inv models   # lists what pull takes"
        raise UsageError(f"{repository[:100]!r} is not a repository", why, fix)
    hub.fetch_and_report(repository, revision, caller_path(to), caller_path(mirror), replace=replace)


@task(example="./inv list", json_="print it as JSON")
def list_(_ctx: Context, json_: bool = False) -> None:
    """List the models on this machine, their size and what uses them.

    It lists pull's folder and Hugging Face's cache. A file that snapshots share counts once.
    """
    from sparkforge.serve import stored

    stored.show(os.environ, as_json=json_)


@task(example="./inv rm gpt-oss-120b", model="a name or a folder from ./inv list", yes="do not ask")
def rm(_ctx: Context, model: str, yes: bool = False) -> None:
    """Remove a model from this machine, unless something uses it."""
    from sparkforge.serve import stored

    stored.remove(caller_path(model) if model.startswith((".", "/", "~")) else model, os.environ, yes=yes)


@dataclass(frozen=True)
class PlanOptions:
    """Options of `./inv plan`: the fields of `sparkforge.plan.planner.PlanRequest`."""

    model: str = option("a recipe (./inv models), a folder of a checkpoint, or a config.json", positional=True)
    device: str = option(
        "spark, h100, h200, b200, rtx-pro-6000, rtx-5090, or this: the machine that you are on", "spark"
    )
    context: str = option("tokens per sequence, prompt and answer; default 8192, or what the device's profiles allow")
    concurrency: str = option("sequences at once; default 4")
    kv_dtype: str = option("type of the KV cache: auto, bf16 or fp8", "auto")
    resident: str = option("GB that the system and other programs keep in use; default: the device's measured value")
    nodes: str = option("plan also for this many machines together, such as 2; default: the recipe's")
    draft: str = option("compute the gain of speculation with ngram or a draft of the recipe; eagle3:3 for 3 tokens")


@task(
    example="./inv plan gpt-oss-120b --device spark --context 32768",
    options=PlanOptions,
    json_="print the plan as JSON",
)
def plan(_ctx: Context, options: PlanOptions, json_: bool = False) -> None:
    """Compute a model's memory and speed on a device.

    Prints what the model needs, what fits, how fast it can be, and the serve profile for it.
    """
    from sparkforge.bench import baselines
    from sparkforge.bench import schema as results
    from sparkforge.models import recipes
    from sparkforge.plan import planner, screen
    from sparkforge.plan.planner import PlanRequest
    from sparkforge.serve import profiles
    from validate.facts import gpu

    known = recipes.load()
    request = PlanRequest(**vars(replace(options, model=name_or_path(options.model, known))))
    planned = known[request.model].plan if request.model in known else None
    if not request.nodes and planned and planned.machines > 1 and request.device == planned.device:
        request = replace(request, nodes=str(planned.machines))
    subject, name = planner.read_subject(request.model, known), gpu.name() if request.device == "this" else ""
    if name:
        subject = replace(subject, measured=results.newest_speed(subject.name))
    served = profiles.load_options(family=subject.model.family)
    screen.report(request, subject, served, baselines.load().figures, gpu=name, as_json=json_)
