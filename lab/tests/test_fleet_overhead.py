"""A fleet's added latency: the same requests and streams, directly and through the real HAProxy."""

from lab import fleet_overhead
from sparkforge.core.files import read_json


def test_every_request_and_stream_arrives_directly_and_through_haproxy(tmp_path, free_port, monkeypatch):
    monkeypatch.setattr(fleet_overhead, "PIECES", 3)
    result = tmp_path / "fleet.json"
    fleet_overhead.main(str(result), clients=4, each=5, streams=20, rounds=2, port=free_port())
    figures = read_json(result)
    assert figures["requests"] == 40
    assert figures["direct"]["streams_whole"] == figures["haproxy"]["streams_whole"] == 20
