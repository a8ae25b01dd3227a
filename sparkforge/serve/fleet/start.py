"""Start a fleet: its plan, HAProxy and the resident models, as one server of this checkout."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from sparkforge.core import interrupt, paths
from sparkforge.core.advice import on
from sparkforge.core.console import Steps
from sparkforge.core.errors import ServerError
from sparkforge.core.files import write_json
from sparkforge.core.openai import POLL_SECONDS, Endpoint
from sparkforge.image.devices import FLEET
from sparkforge.plan import thresholds
from sparkforge.serve import access, launch, record, settings, status
from sparkforge.serve.fleet import config, keeper, router
from sparkforge.serve.fleet.config import GB, Fleet
from sparkforge.serve.launch import Launch
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.record import Server


def start(file: Path, plan: StartPlan) -> Server:
    """Start the fleet of a fleet.toml where `plan` says, and return it once its resident models have proved themselves.

    It uses the plan's address, port, key, hosts and interpreter. Raises what `config.make_plan` and `launch.starting`
    raise, and ServerError for a resident model that does not start; nothing is left running then.
    """
    access.refuse_inherited_key(os.environ)
    settings.judge(os.environ)
    steps, again = Steps(2), f"./inv up --fleet {file}"
    key_file = access.key_path(plan.key_file)
    key = access.read_key(key_file) if key_file else ""
    with launch.starting(), ExitStack() as stack:
        launch.check_free(plan.port, plan.address, again)
        with steps.step("plan", str(file)) as tell:
            more = ("--python", plan.python) if plan.python else ()
            free = config.free_memory()
            members = config.make_plan(config.read(file), file.parent, free, more)
            fleet = Fleet(
                address=plan.address, port=plan.port, key_file=str(key_file or ""), free=free, members=tuple(members),
                hosts=access.chosen_hosts(plan.hosts, os.environ),
                guard=os.environ.get(thresholds.VARIABLE, ""),
            )  # fmt: skip
            needs = [f"{m.name} {m.needed / GB:.1f} GB{' resident' if m.resident else ''}" for m in members]
            tell(f"{', '.join(needs)}; {', '.join(f'{size / GB:.1f} GB free ({pool})' for pool, size in free.items())}")
        paths.secure_state()
        write_json(paths.state() / keeper.PLAN, fleet.model_dump(mode="json"), mode=0o600)
        (paths.state() / status.FLEET_FILE).unlink(missing_ok=True)
        first = min(members, key=lambda member: not member.resident).name
        own = replace(plan, device=FLEET, model_id=first, key_file=fleet.key_file)
        # Each model has a guard of its own, which ends that model alone (Keeper._guard).
        environment = {access.KEY_FILE: fleet.key_file, thresholds.VARIABLE: "0"}
        command = (sys.executable, "-P", "-m", keeper.__name__)
        with steps.step("models") as tell:
            with interrupt.held():
                server = launch.begin(Launch(command, {**environment, "PYTHONPATH": str(paths.ROOT)}, own, file))
                stack.push(lambda kind, *_: launch.end(server) if kind else None)
            while not (rows := status.fleet()) or any(row["resident"] and row["state"] != keeper.READY for row in rows):
                for row in rows:
                    if row["resident"] and row["state"] == keeper.FAILED:
                        log = paths.state() / router.FOLDER / "models" / row["name"] / "up.log"
                        failure = f"the resident model {row['name']} does not start"
                        raise ServerError(failure, row["error"], on("less", log, f"then {again}"), code="server.start")
                if not server.alive:
                    why = f"it {record.how_it_ended(server)}"
                    raise ServerError("the fleet has ended", why, on("less", server.log), code="server.start")
                tell(", ".join(f"{row['name']} {row['state']}" for row in rows))
                time.sleep(POLL_SECONDS)
            if not Endpoint(server.url, key=key).healthy():
                why, fix = "HAProxy does not answer /health", on("less", server.log)
                raise ServerError("the fleet does not answer", why, fix, code="server.start")
            tell(", ".join(f"{row['name']} {row['state']}" for row in rows))
        server = replace(server, proved=time.time())
        record.write(server)
        return server
