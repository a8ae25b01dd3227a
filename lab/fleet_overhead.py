"""`python -m lab.fleet_overhead`: measure the latency that a fleet's HAProxy adds, and the streams that it can serve.

An asyncio server replaces vLLM: it answers after WAIT seconds, or streams a piece every GAP seconds. Requests go to it
directly and through HAProxy with a fleet's configuration (key, Host check, `model` read from the body). Both ways
alternate, so that other programs slow them equally. On a busy machine run this as root under `chrt -r 10`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from sparkforge.bench.context import facts
from sparkforge.core.console import echo, say
from sparkforge.core.errors import BenchmarkError
from sparkforge.core.files import write_json
from sparkforge.core.process import Child
from sparkforge.core.program import exit_code
from sparkforge.serve.fleet import router
from sparkforge.serve.fleet.config import Fleet, Member
from sparkforge.serve.fleet.router import FOLDER

LOCAL, KEY, MODEL = "127.0.0.1", "sesame", "openai/model"
WAIT, GAP = 0.05, 0.1  # seconds until an answer, seconds between two pieces of a stream
PIECES = 50  # of a stream
BODY_BYTES = 2000
ANSWER = b'{"choices": []}'
PIECE = b"data: {}\n\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection."""
    while head := await read_head(reader):
        body = await reader.readexactly(head[1])
        if b"stream" in body:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(PIECES):
                writer.write(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
                await asyncio.sleep(GAP)
            writer.write(b"0\r\n\r\n")
        else:
            await asyncio.sleep(WAIT)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER))
    writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[bytes, int] | None:
    """Return the first line and the body's length; None if the connection ends."""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return first, next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)


def serve(ports: Any) -> None:
    """Serve until the process is killed; put the port into the queue `ports`."""

    async def run() -> None:
        server = await asyncio.start_server(answer, LOCAL, 0, backlog=1024)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def request(port: int, **more: Any) -> bytes:
    """Return a request's bytes."""
    body = json.dumps({"model": MODEL, "text": "x" * BODY_BYTES, **more}).encode()
    head = f"POST /v1/x HTTP/1.1\r\nhost: {LOCAL}:{port}\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def ask(port: int, clients: int, each: int) -> list[float]:
    """Run `clients` clients at once, each with one connection and `each` requests; return every request's seconds."""

    async def client() -> list[float]:
        reader, writer = await asyncio.open_connection(LOCAL, port)
        times = []
        for _ in range(each):
            began = time.perf_counter()
            writer.write(request(port))
            head = await read_head(reader)
            if not head or b" 200 " not in head[0]:
                raise BenchmarkError("a request was lost", str(head), "run it again", code="benchmark.load")
            await reader.readexactly(head[1])
            times.append(time.perf_counter() - began)
        writer.close()
        return times

    return [seconds for times in await asyncio.gather(*(client() for _ in range(clients))) for seconds in times]


async def stream(port: int, streams: int) -> tuple[int, list[float]]:
    """Read `streams` streams at once; return the number of complete ones, and the seconds between two pieces."""

    async def client() -> list[float]:
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(request(port, stream=True))
        await read_head(reader)
        times = []
        while line := await reader.readline():
            times += [time.perf_counter()] if line.startswith(b"data:") else []
            if line == b"0\r\n":
                break
        writer.close()
        return times

    all_times = await asyncio.gather(*(client() for _ in range(streams)))
    gaps = [later - earlier for times in all_times for earlier, later in pairwise(times)]
    return sum(len(times) == PIECES for times in all_times), gaps


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    return {"p50_ms": round(1000 * median(seconds), 2), "p99_ms": round(1000 * quantiles(seconds, n=100)[98], 2)}


def measure(direct: int, routed: int, *, clients: int, each: int, streams: int, rounds: int) -> dict[str, Any]:
    """Send requests to both ports in turn; return the figures of each port and their difference."""
    ports, times = {"direct": direct, "haproxy": routed}, dict[str, list[float]](direct=[], haproxy=[])
    for _ in range(rounds):
        for name, port in ports.items():
            times[name] += asyncio.run(ask(port, clients, each))
    result: dict[str, Any] = {"clients": clients, "requests": len(times["direct"]), "streams": streams}
    for name, port in ports.items():
        whole, gaps = asyncio.run(stream(port, streams))
        result[name] = {**summary(times[name]), "streams_whole": whole, "gaps": summary(gaps)}
    result["added_p50_ms"] = round(result["haproxy"]["p50_ms"] - result["direct"]["p50_ms"], 2)
    return result


def main(output: str, **sizes: int) -> None:
    """Measure, print and save. Raises BenchmarkError for a lost request or stream."""
    queue: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(queue,), daemon=True)
    server.start()
    port = queue.get(timeout=30)
    with tempfile.TemporaryDirectory(prefix="sparkforge-fleet-") as folder:
        (state := Path(folder) / "s").mkdir()
        (state / FOLDER).mkdir()
        member = Member(
            name="model", names=("model", MODEL), folder="", needed=0, pool="host", resident=True, idle_seconds=0,
            arguments=(), flags=(),
        )  # fmt: skip
        fleet = Fleet(address=LOCAL, port=sizes.pop("port"), key_file="", hosts=(), free={}, members=(member,))
        command = router.write(state, fleet, KEY, {"model": port})
        haproxy = Child(command, log=state / "haproxy.log", env={}, cwd=state)
        try:
            while not (state / router.ADMIN).exists() and haproxy.poll() is None:
                time.sleep(0.05)
            result = measure(port, fleet.port, **sizes)
        finally:
            haproxy.end()
            server.kill()
    scheduler = {os.SCHED_RR: "real time (chrt -r 10)"}.get(os.sched_getscheduler(0), "shared with other programs")
    write_json(Path(output), {"machine": facts(), "processor_time": scheduler, **result})
    both = {name: result[name] for name in ("direct", "haproxy")}
    for name, row in both.items():
        echo(f"{name}: {row['p50_ms']} ms (p99 {row['p99_ms']}), streams {row['streams_whole']} of {result['streams']}")
    say(f"HAProxy adds {result['added_p50_ms']} ms; saved {output}")
    if lost := [name for name, row in both.items() if row["streams_whole"] < result["streams"]]:
        raise BenchmarkError(f"{lost[0]} lost streams", "see streams_whole", f"less {output}", code="benchmark.load")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.fleet_overhead", description=__doc__)
    for name, default in {"clients": 16, "each": 100, "streams": 300, "rounds": 5, "port": 18555}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--output", default="bench/results/fleet.json", help="JSON file for the figures")
    options = vars(parser.parse_args())
    sys.exit(exit_code(lambda: main(**options)))
