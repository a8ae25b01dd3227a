"""What leaves the machine: only to a given URL, only what passed, once, without secrets and places."""

import json
import re
import socket
from pathlib import Path

import pytest

from sparkforge import pins
from sparkforge.bench import schema, submit
from sparkforge.bench.gate import Passage
from sparkforge.core.errors import BenchmarkError, InputError, NetworkError, UsageError


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    waited = []
    monkeypatch.setattr(submit.time, "sleep", waited.append)
    return waited


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


def test_without_a_url_nothing_is_posted(stub, saved, capsys):
    send(saved)
    assert stub.posted == []
    assert "nothing was posted" in capsys.readouterr().err


def test_json_is_posted_redacted_and_once(stub, make_result, tmp_path):
    path, home = tmp_path / "r.json", str(Path.home())
    secret = make_result(
        server={
            "model": "/data/people/anna/models/gpt-oss-120b",
            "records": {
                "note": f"{home}/x on {socket.gethostname()} Bearer abcdef123456 hf_abcdefgh",
                "api_key": "k",
            },
            "findings": [{"told": "http://spark-7.example.org:8000/v1 and 10.1.2.3, key=sk-abcdefgh"}],
        }
    )
    schema.write(path, secret)
    send(path, f"{stub.url}/board")
    (posted,) = stub.posted
    text = json.dumps(posted)
    assert posted["team"] == "Team"
    for leak in (
        "anna",
        "abcdef123456",
        "hf_abcdefgh",
        "sk-abcdefgh",
        "spark-7",
        "10.1.2.3",
        socket.gethostname(),
        '"k"',
    ):
        assert not re.search(rf"(?<!\w){re.escape(leak)}(?!\w)", text), leak
    assert posted["result"]["server"]["model"] == "<path>/gpt-oss-120b"
    assert posted["result"]["metrics"]["tput_per_gpu"] == secret.metrics.tput_per_gpu
    assert stub.bodies[-1][2]["Idempotency-Key"] == secret.digest
    send(path, f"{stub.url}/board")
    assert len(stub.posted) == 1
    assert schema.read(path) == secret  # the file itself keeps everything


@pytest.mark.parametrize("answers", [[503], [429, 500], ["drop"], [502, 504, "drop"]])
def test_what_may_pass_is_tried_again(stub, saved, answers, no_waiting):
    stub.post_answers = list(answers)
    send(saved, f"{stub.url}/board")
    assert len(stub.posted) == 1
    assert len(no_waiting) == len(answers)


@pytest.mark.parametrize("answers", [[400], [403], [500] * 9])
def test_a_refused_post_keeps_the_result(stub, saved, answers):
    stub.post_answers = list(answers)
    before = saved.read_bytes()
    with pytest.raises(NetworkError, check=lambda error: error.code == "network.submit") as caught:
        send(saved, f"{stub.url}/board")
    assert f"--result {saved}" in caught.value.fix
    assert saved.read_bytes() == before
    assert not saved.with_suffix(".submitted.json").exists()
    stub.post_answers = []
    send(saved, f"{stub.url}/board")
    assert len(stub.posted) == 1


def test_nobody_there_is_an_error_after_some_tries(saved, no_waiting):
    with pytest.raises(NetworkError, match="not posted", check=lambda error: error.code == "network.submit"):
        send(saved, "http://127.0.0.1:9/board")
    assert len(no_waiting) == len(submit.WAITS)


def test_the_competitions_form_has_its_fourteen_columns(stub, board_saved, make_result):
    send(board_saved, stub.url, "gradio")
    (posted,) = stub.posted
    m, data = make_result().metrics, posted["data"]
    assert data[:6] == ["Team", 4, m.e2el_ms.median, m.tput_per_gpu, 2162.0, 413.779]
    assert data[6] == pytest.approx(m.e2el_ms.median / 2162.0)
    assert data[7] == pytest.approx(m.tput_per_gpu / 413.779)
    assert data[8:10] == [m.interactivity, 434.57]
    assert data[11:] == [2.06, 4.17, 223.0]
    assert len(data) == 14


def test_a_shape_without_a_baseline_has_zeros(stub, board_result, tmp_path):
    schema.write(tmp_path / "r.json", board_result(conc=16))
    send(tmp_path / "r.json", stub.url, "gradio")
    assert stub.posted[0]["data"][4:8] == [0.0, 0.0, 0.0, 0.0]
    assert len(stub.posted[0]["data"]) == 14


def test_a_form_that_may_have_arrived_is_not_sent_again(stub, board_saved):
    stub.post_answers = ["drop"]
    with pytest.raises(NetworkError, match="not posted", check=lambda error: error.code == "network.submit") as caught:
        send(board_saved, stub.url, "gradio")
    assert "may have arrived" in caught.value.why
    assert stub.asked["/gradio_api/call/submit_results"] == 1


def test_a_board_that_refuses_the_form_is_believed(stub, board_saved):
    stub.lie = "gradio error"
    with pytest.raises(NetworkError, match="the board refused", check=lambda error: error.code == "network.submit"):
        send(board_saved, stub.url, "gradio")


def test_a_failed_result_is_never_posted(stub, make_result, tmp_path):
    schema.write(tmp_path / "r.json", make_result(passed=False))
    with pytest.raises(InputError, check=lambda error: error.code == "input.result"):
        send(tmp_path / "r.json", f"{stub.url}/board")
    assert stub.posted == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"team": " "},
        {"team": "a\nb"},
        {"team": "x" * 81},
        {"form": "fax"},
        {"url": "file:///tmp/x"},
        {"url": "http://127.0.0.1:x"},
        {"url": "http://["},
        {"url": "http://"},
        {"url": "http://h:99999/"},
    ],
)
def test_a_wrong_argument_is_named(saved, wrong):
    with pytest.raises(UsageError):
        send(saved, **{"url": "http://127.0.0.1:9", **wrong})


@pytest.mark.parametrize(
    "answer", ["[" * 100_000, "[]", '{"event_id": 5}', '{"event_id": "../../x"}', '{"event_id": "a b"}']
)
def test_a_board_whose_answer_names_no_event_is_said_to_be_silent(stub, board_saved, answer, monkeypatch):
    reply = submit.httpx.Response(200, content=answer.encode())
    monkeypatch.setattr(submit, "send", lambda *_arguments, **_options: reply)
    with pytest.raises(NetworkError, match="did not say whether", check=lambda error: error.code == "network.submit"):
        send(board_saved, stub.url, "gradio")


def test_a_damaged_note_of_an_earlier_post_is_no_post(stub, saved):
    saved.with_suffix(".submitted.json").write_text("[" * 100_000)
    send(saved, f"{stub.url}/board")
    assert len(stub.posted) == 1


@pytest.mark.parametrize("form", ["json", "gradio"])
def test_no_more_of_a_boards_answer_is_read_than_the_limit(stub, board_saved, form, monkeypatch):
    monkeypatch.setattr(submit, "ANSWER_BYTES", 5)
    with pytest.raises(NetworkError, match="not posted", check=lambda error: "more than 5 bytes" in error.why):
        send(board_saved, f"{stub.url}/board", form)


def test_the_next_command_names_the_board_of_the_shape(saved, stub, capsys):
    send(saved)
    text = " ".join(capsys.readouterr().err.split())
    assert "https://daniehua-gptoss-fp4-vllm-isl1024osl1024.hf.space" in text
    assert "--to board" in text


def test_to_board_posts_the_competitions_form_to_the_board_of_the_shape(stub, board_saved, table, monkeypatch):
    urls = {(1024, 1024): stub.url}
    boards = [
        board.model_copy(update={"url": urls.get((board.isl, board.osl), "http://127.0.0.1:9")})
        for board in table.competition.boards
    ]
    competition = table.competition.model_copy(update={"boards": boards})
    monkeypatch.setattr(submit.baselines, "load", lambda: table.model_copy(update={"competition": competition}))
    send(board_saved, "board")
    assert stub.asked == {"/gradio_api/call/submit_results": 1}


REFUSED = {
    "another text": ({"gate": {"text_sha256": "0" * 64}}, "the text is not wikitext-2-raw-test"),
    "no text known": ({"gate": {"text_sha256": ""}}, "the text is not wikitext-2-raw-test"),
    "no figure": ({"gate": {"bits_per_byte": None}}, "bits_per_byte is None, and the board takes at most 2.1175"),
    "above a limit": ({"gate": {"word_perplexity": 229.5}}, "word_perplexity is 229.5, and the board takes"),
    "chunks by bytes": ({"gate": {"chunked_by": "bytes"}}, "not into chunks of 512 tokens"),
    "another model": ({"team_model": "tiny-gpt-oss"}, "the model is tiny-gpt-oss"),
    "another shape": ({"isl": 64}, "there is no board for 64/1024"),
}


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("to", ["the form", "board"])
def test_the_board_refuses_what_was_not_measured_as_it_wants(stub, board_result, tmp_path, wrong, to):
    changes, why = REFUSED[wrong]
    schema.write(tmp_path / "r.json", board_result(**changes))
    with pytest.raises(BenchmarkError, check=lambda error: error.code == "benchmark.board") as caught:
        send(tmp_path / "r.json", *((stub.url, "gradio") if to == "the form" else ("board",)))
    assert why in caught.value.why
    assert stub.posted == []


@pytest.mark.parametrize("end", ["", "/"])
def test_the_board_of_another_shape_is_refused(stub, board_saved, table, end):
    other = table.competition.url(1024, 8192) + end
    for form in ("", "gradio"):
        with pytest.raises(BenchmarkError, check=lambda error: error.code == "benchmark.board") as caught:
            send(board_saved, other, form)
        assert f"that of 1024/1024 is {table.competition.url(1024, 1024)}" in caught.value.why


def test_what_is_above_the_boards_limits_is_not_loaded(stub, table, tmp_path, monkeypatch):
    board = table.competition.model_copy(update={"model": "honest-model", "at_most": {"bits_per_byte": 0.1}})
    text = pins.load().texts[board.text]
    passage = Passage("persuasion-24", "words and words " * 50, text.pinned_files[text.member].sha256)
    monkeypatch.setattr(submit.baselines, "load", lambda: table.model_copy(update={"competition": board}))
    monkeypatch.setattr(submit.runs.gate, "passage", lambda *_: passage)
    flags = {"team": "T", "to": "board", "url": stub.url, "output": str(tmp_path), "isl": "1024", "osl": "1024"}
    with pytest.raises(BenchmarkError, check=lambda error: "the board takes at most 0.1" in error.why):
        submit.main({**flags, "conc": "1"})
    assert not [body for _, body, _ in stub.bodies if body.get("stream")]


@pytest.mark.parametrize("shape", [("1024", "1024"), ("24", "8")])
def test_what_the_board_would_refuse_is_not_measured(stub, table, tmp_path, shape):
    isl, osl = shape
    flags = {"team": "T", "to": table.competition.url(1024, 8192), "url": stub.url, "output": str(tmp_path)}
    with pytest.raises(BenchmarkError, match="does not take this", check=lambda error: error.code == "benchmark.board"):
        submit.main({**flags, "isl": isl, "osl": osl, "conc": "1"})
    assert not stub.asked
