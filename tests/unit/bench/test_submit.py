"""Submissions go only to a given URL, only for passed results, once, and without secrets and paths."""

import itertools
import json
import re
import socket
from pathlib import Path

import pytest
from expected import refused

from sparkforge.bench import schema, submit
from sparkforge.core.errors import UsageError


@pytest.fixture
def saved(make_result, tmp_path):
    path = tmp_path / "result.json"
    schema.write(path, make_result())
    return path


@pytest.fixture
def board_saved(board_result, tmp_path):
    path = tmp_path / "board_result.json"
    schema.write(path, board_result())
    return path


def send(path, url="", form="", team="Team"):
    submit.main({"team": team, "result": str(path), "to": url, "form": form})


def test_json_is_posted_redacted_and_once(stub, make_result, tmp_path):
    path = tmp_path / "r.json"
    note = f"{Path.home()}/x on {socket.gethostname()} Bearer abcdef123456 hf_aBcdefgh"
    told = "http://spark-7.example.org:8000/v1 and 10.1.2.3, key=sk-abcdefgh"
    server = {"model": "/data/people/anna/models/gpt-oss-120b", "records": {"note": note, "api_key": "k"}}
    secret = make_result(server={**server, "findings": [{"told": told}]})
    schema.write(path, secret)
    for _ in range(2):
        send(path, f"{stub.url}/board")
    (posted,) = stub.posted
    text = json.dumps(posted)
    leaks = "anna", "abcdef123456", "hf_aBcdefgh", "sk-abcdefgh", "spark-7", "10.1.2.3", socket.gethostname(), '"k"'
    for leak in leaks:
        assert not re.search(rf"(?<!\w){re.escape(leak)}(?!\w)", text), leak
    assert (posted["team"], posted["result"]["server"]["model"]) == ("Team", "<path>/gpt-oss-120b")
    assert posted["result"]["metrics"]["tput_per_gpu"] == secret.metrics.tput_per_gpu
    assert stub.bodies[-1][2]["Idempotency-Key"] == secret.digest
    assert schema.read(path) == secret  # the file is not redacted


def test_nothing_is_posted_without_a_url_or_for_a_failed_result(stub, saved, make_result, tmp_path, capsys):
    send(saved)
    assert "nothing was posted" in capsys.readouterr().err
    schema.write(tmp_path / "r.json", make_result(passed=False))
    with refused("input.result"):
        send(tmp_path / "r.json", f"{stub.url}/board")
    assert stub.posted == []


def test_a_refused_post_keeps_the_result(stub, saved):
    stub.post_answers = [429]
    before = saved.read_bytes()
    with refused("network.submit") as caught:
        send(saved, f"{stub.url}/board")
    assert f"--result {saved}" in caught.value.fix
    assert saved.read_bytes() == before
    assert not saved.with_suffix(".submitted.json").exists()
    send(saved, f"{stub.url}/board")
    assert len(stub.posted) == 1


def test_the_competitions_form_has_its_fourteen_columns(stub, board_saved, make_result, board_result):
    send(board_saved, stub.url, "gradio")
    schema.write(board_saved, board_result(conc=16))  # a shape without a baseline
    send(board_saved, stub.url, "gradio")
    posted, without = stub.posted
    assert without["data"][4:8] == [0.0] * 4
    m, data = make_result().metrics, posted["data"]
    assert data[:6] == ["Team", 4, m.e2el_ms.median, m.tput_per_gpu, 2162.0, 413.779]
    assert data[6] == pytest.approx(m.e2el_ms.median / 2162.0)
    assert data[7] == pytest.approx(m.tput_per_gpu / 413.779)
    assert data[8:10] == [m.interactivity, 434.57]
    assert data[11:] == [2.06, 4.17, 223.0]
    assert len(data) == 14


def test_a_form_that_may_have_arrived_is_not_sent_again_and_a_refusal_is_believed(stub, board_saved):
    stub.post_answers = ["drop"]
    with refused("network.submit", "may have arrived"):
        send(board_saved, stub.url, "gradio")
    assert stub.asked["/gradio_api/call/submit_results"] == 1
    stub.lie = "gradio error"
    with refused("network.submit", "the board refused"):
        send(board_saved, stub.url, "gradio")


def test_a_wrong_argument_is_named(saved):
    for wrong in ({"team": " "}, {"team": "a\nb"}, {"form": "fax"}, {"url": "file:///tmp/x"}, {"url": "http://["}):
        with pytest.raises(UsageError):
            send(saved, **{"url": "http://127.0.0.1:9", **wrong})


def test_a_board_whose_answer_names_no_event_is_said_to_be_silent_and_an_endless_one_is_not_read(stub, board_saved):
    for stub.board_answer in (b"[" * 100_000, b'{"event_id": "../../x"}'):
        with refused("network.submit", "unknown whether the board"):
            send(board_saved, stub.url, "gradio")
    stub.board_answer = b" " * (submit.ANSWER_BYTES + 1)
    for form in ("json", "gradio"):
        with refused("network.submit", "not posted.*more than 1048576 bytes"):
            send(board_saved, f"{stub.url}/board", form)


def test_to_board_posts_the_competitions_form_to_the_board_of_the_shape(stub, board_saved, table, monkeypatch):
    boards = {shape: stub.url if shape == "1024/1024" else "http://127.0.0.1:9" for shape in table.competition.boards}
    competition = table.competition.model_copy(update={"boards": boards})
    monkeypatch.setattr(submit.baselines, "load", lambda: table.model_copy(update={"competition": competition}))
    send(board_saved, "board")
    assert stub.asked == {"/gradio_api/call/submit_results": 1}


REFUSED = {
    "another text": ({"gate": {"text_sha256": "0" * 64}}, "the text is not wikitext-2-raw-test"),
    "no figure": ({"gate": {"bits_per_byte": None}}, "bits_per_byte is None, and the board takes at most 2.1175"),
    "above a limit": ({"gate": {"word_perplexity": 229.5}}, "word_perplexity is 229.5, and the board takes"),
    "chunks by bytes": ({"gate": {"chunked_by": "bytes"}}, "not into chunks of 512 tokens"),
    "another model": ({"team_model": "tiny-gpt-oss"}, "the model is tiny-gpt-oss"),
    "another shape": ({"isl": 64}, "there is no board for 64/1024"),
}


@pytest.mark.parametrize(("changes", "why"), REFUSED.values(), ids=REFUSED)
def test_results_that_break_the_boards_rules_are_refused(stub, board_result, tmp_path, changes, why):
    schema.write(tmp_path / "r.json", board_result(**changes))
    for place in ((stub.url, "gradio"), ("board",)):
        with refused("benchmark.board", why):
            send(tmp_path / "r.json", *place)
    assert stub.posted == []


def test_the_board_of_another_shape_is_refused_and_before_a_run_too(stub, board_saved, table, tmp_path):
    other, right = (table.competition.boards[shape] for shape in ("1024/8192", "1024/1024"))
    for url, form in itertools.product((other, f"{other}/"), ("", "gradio")):
        with refused("benchmark.board", f"that of 1024/1024 is {right}"):
            send(board_saved, url, form)
    flags = {"team": "T", "to": other, "url": stub.url, "output": str(tmp_path), "conc": "1"}
    for isl, osl in (("1024", "1024"), ("24", "8")):
        with refused("benchmark.board", "does not accept this"):
            submit.main({**flags, "isl": isl, "osl": osl})
    assert not stub.asked
