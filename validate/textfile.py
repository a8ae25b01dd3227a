"""A validation report as a Prometheus textfile: a series for each check and status, 1 for the current status.

The input is the report's JSON document, because a hung validator is also reported as such a document.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

import sparkforge
from validate.checks.finding import Status
from validate.gate import ValidationVerdict

NAME = "sparkforge_validation.prom"
# Label of sparkforge_build_info → its fact.
BUILD = {"vllm": "vllm.version", "torch": "torch.version", "flashinfer": "flashinfer.version", "gpu": "gpu.name"}


def text(document: Mapping[str, Any], mode: str) -> bytes:
    """Return the textfile of a report's JSON document; `mode` is SPARKFORGE_VALIDATE's."""
    registry, facts = CollectorRegistry(), document["facts"]
    build = {label: str((facts.get(fact) or {}).get("value") or "") for label, fact in BUILD.items()}
    build |= {"sparkforge": sparkforge.__version__, "profile": str(document["profile"]), "mode": mode}
    Gauge("sparkforge_build_info", "Versions, always 1", list(build), registry=registry).labels(**build).set(1)
    names, about = ["check", "status", "required"], "1 for the status that the check has"
    check = Gauge("sparkforge_validation_check", about, names, registry=registry)
    for finding in document["findings"]:
        for status in Status:
            labels = (finding["check"], str(status), str(finding["required"]).lower())
            check.labels(*labels).set(finding["status"] == status)
    about = "1 for the verdict that was reached"
    verdict = Gauge("sparkforge_validation_verdict", about, ["verdict"], registry=registry)
    for name in ValidationVerdict:
        verdict.labels(str(name)).set(document["verdict"] == name)
    when = Gauge("sparkforge_validation_timestamp_seconds", "When the validation ended, Unix time", registry=registry)
    when.set(datetime.fromisoformat(document["timestamp"]).timestamp())
    spent = Gauge("sparkforge_validation_seconds", "Seconds spent, by stage", ["stage"], registry=registry)
    for stage, seconds in document["seconds"].items():
        spent.labels(stage).set(seconds)
    return bytes(generate_latest(registry))
