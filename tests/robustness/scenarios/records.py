"""Small files of state: the last failure, the server's record, and the support archive."""

import json
import tarfile
from contextlib import suppress

from robustness.scenario import Scenario, write
from sparkforge.core.errors import ServerError, SparkforgeError, StorageError
from sparkforge.doctor import doctor, evidence
from sparkforge.serve import record
from sparkforge.serve.record import Server

SERVER = Server(pid=1, started=1.0, host="127.0.0.1", port=20999, model="m", model_id="m", device="embedded", log="l")


def _prepare_failure(work):
    write(work / "state/mine.json", "{}")
    _fail("the first")


def _fail(reason):
    """End like a failed `./inv up`."""
    with suppress(ServerError), record.remembered():
        raise ServerError(reason, "why", "next", code="server.start")


def _act_failure(work):
    _fail("the second")
    written = record.read_failure(work / "state")
    assert written is None or written.what in {"the first", "the second"}
    # Recording a failure may itself fail silently, as on a full disk; then the old failure or none is reported.
    if written is None or written.what != "the second":
        raise SparkforgeError("the failure was not remembered", "the disk is broken", "run it again")


def _judge_failure(work):
    written = record.read_failure(work / "state")
    assert written is not None
    assert written.what in {"the first", "the second"}


def _prepare_record(work):
    (work / "state").mkdir(mode=0o700)
    write(work / "state/mine.json", "{}")
    record.write(SERVER)


def _act_record(work):
    record.forget()
    record.write(SERVER)


def _judge_record(work):
    """The record is complete or absent."""
    if record.record_path().exists():
        assert json.loads(record.record_path().read_text())["port"] == SERVER.port


def _prepare_support(work):
    write(work / "state/logs/server.log", "INFO begin\n" * 2000)
    write(work / "state/kernels.manifest.json", "{}")
    write(work / "out/mine.tar.gz", "mine")
    write(work / "out/support.tar.gz", "an older one")


def _act_support(work):
    log = evidence.open_log(str(work / "state/logs/server.log"))
    for _ in log.chunks():
        pass
    if log.broken:
        raise StorageError("the log cannot be read", log.broken, "ls -l", code="storage.access")
    doctor.write_archive(work / "out/support.tar.gz", {"problems": []}, evidence.Evidence(logs=[log]))


def _judge_support(work):
    """The archive is the old one or a complete new one."""
    if (work / "out/support.tar.gz").read_bytes() != b"an older one":
        with tarfile.open(work / "out/support.tar.gz") as opened:
            assert len(opened.getnames()) > 2


SCENARIOS = [
    Scenario("failure-record", _prepare_failure, _act_failure, _judge_failure, volatile=("state/failure.json",)),
    Scenario("server-record", _prepare_record, _act_record, _judge_record),
    Scenario("support", _prepare_support, _act_support, _judge_support),
]
