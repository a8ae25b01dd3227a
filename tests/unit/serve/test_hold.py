"""A refused start that waits: pauses that grow, and what systemd is told."""

import socket

import pytest

from sparkforge.core import notify
from sparkforge.core.errors import RefusalError
from sparkforge.serve import hold

REFUSAL = RefusalError("the validator refuses to serve", "no memory", "free some")


def test_a_refused_start_is_tried_again_until_it_is_admitted(monkeypatch):
    waited, reasons, answers = [], [], [REFUSAL, REFUSAL, None]

    def start():
        answer = answers.pop(0)
        if answer:
            raise answer
        return "served"

    monkeypatch.setattr(hold.time, "sleep", waited.append)
    assert hold.until_admitted(start, reasons.append) == "served"
    assert waited == [30, 60]
    assert all(line.startswith("refused: ") and "no memory" in line for line in reasons)


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_in_its_own_words(monkeypatch, tmp_path, abstract):
    name = f"@{tmp_path.name}-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name[1:]}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify.tell(ready=True, status="serves\nX_INJECTED=1")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serves X_INJECTED=1"


def test_without_systemd_nothing_is_told(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.tell(ready=True)
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent/notify")
    notify.tell(ready=True)


def test_only_the_option_holds(monkeypatch):
    monkeypatch.setattr(hold, "until_admitted", lambda *_: "held")

    @hold.held
    def up(**_options):
        raise REFUSAL

    assert up(hold=True, model="~/model") == "held"
    with pytest.raises(RefusalError):
        up(hold=False)
