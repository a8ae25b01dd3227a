"""The gate's text: from a file, an archive or a hub, and only with the hash of its pin."""

import hashlib
import io
import zipfile

import pytest
from expected import refused

from sparkforge import pins
from sparkforge.bench import gate, text
from sparkforge.core.errors import IntegrityError, UsageError

NAME = "wikitext-2-raw-test"
RAW = " \n = Title = \n \n A paragraph , of words . \n Another ö with more . \n \n"
MEMBER, ARCHIVE = "wikitext-2-raw/wiki.test.raw", "wikitext-2-raw-v1.zip"


def zipped(content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, content)
    return buffer.getvalue()


DATA = {MEMBER: RAW.encode(), ARCHIVE: zipped(RAW)}


@pytest.fixture(autouse=True)
def pin(use_pins):
    """A pin of a small text instead of the real text, which may not be redistributed."""
    files = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in DATA.items()}
    table = pins.load()
    real = table.texts[NAME].model_dump(by_alias=True)
    pinned = pins.TextPin.model_validate({**real, "files": files})
    use_pins(table.model_copy(update={"texts": {NAME: pinned}}))
    return pinned


@pytest.fixture
def hub(serve):
    answers = {}
    server = serve(lambda handler: (200, answers[handler.path]) if handler.path in answers else (404,))
    return server.url, answers, server.asked


def fetched():
    return text.path(NAME).read_bytes()


def test_the_hub_is_asked_for_the_archive_at_the_pinned_commit(hub, pin, monkeypatch):
    url, answers, asked = hub
    path = f"/datasets/{pin.dataset}/resolve/{pin.revision}/{ARCHIVE}"
    answers[path] = DATA[ARCHIVE]
    monkeypatch.setenv("HF_ENDPOINT", url + "/")
    text.fetch("hub")
    assert asked == [(path, None)]
    assert fetched() == RAW.encode()


def test_a_text_comes_from_a_file(tmp_path):
    for name, data in DATA.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
        text.fetch(str(tmp_path / name))
        assert fetched() == RAW.encode()
        text.path(NAME).unlink()


@pytest.mark.parametrize("data", [b"", b"another text", DATA[ARCHIVE][:-9], RAW.replace("\n", "\r\n").encode()])
def test_another_file_is_refused_and_the_old_one_stays(tmp_path, data):
    text.path(NAME).parent.mkdir()
    text.path(NAME).write_bytes(RAW.encode())
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(IntegrityError, match="is not the pinned text") as caught:
        text.fetch(str(tmp_path / "x"))
    assert hashlib.sha256(data).hexdigest() in caught.value.why
    assert fetched() == RAW.encode()


def test_a_source_without_the_text_is_named(hub, tmp_path, monkeypatch):
    with refused("input.text", str(tmp_path)):
        text.fetch(str(tmp_path / "none"))
    for endpoint, why in ((hub[0], "HTTP 404"), ("http://user:secret@127.0.0.1:9", "Connect")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with refused("network.fetch", why) as caught:
            text.fetch("hub")
        assert "secret" not in str(caught.value)
    assert not text.path(NAME).exists()


# The gate's choice of text


@pytest.mark.parametrize("model", ["gpt-oss-120b", "openai/gpt-oss-120b", "/models/gpt-oss-20b"])
def test_gpt_oss_is_scored_on_the_competitions_text_or_not_at_all(table, model):
    with refused("input.text", "is not here") as caught:
        gate.passage(table, "", model)
    assert caught.value.fix.startswith("./inv bench.acc --fetch-text hub")
    text.path(NAME).parent.mkdir()
    text.path(NAME).write_bytes(RAW.encode())
    passage = gate.passage(table, "", model)
    assert (passage.name, passage.sha256) == (NAME, hashlib.sha256(RAW.encode()).hexdigest())
    assert passage.text == text.join_rows(RAW)
    threshold = table.threshold(model, NAME)
    assert threshold.bounds("ab" * 5000)[0][1] < 0.1
    assert threshold.bounds(passage.text)[0][1] > 1
    assert "no reference of this model" in threshold.limits
    assert "not measured" in threshold.source


def test_a_changed_text_is_not_scored_and_a_file_does_not_get_the_limits_of_a_text_by_its_name(table, tmp_path):
    text.path(NAME).parent.mkdir()
    text.path(NAME).write_bytes(RAW.replace("more", "less").encode())
    with refused("input.text", "is not wikitext"):
        gate.passage(table, NAME)
    for name in (NAME, "persuasion-24"):
        (tmp_path / f"{name}.txt").write_text("words that a model has learned")
        with pytest.raises(UsageError, match="cannot be called"):
            gate.passage(table, str(tmp_path / f"{name}.txt"))


def test_the_text_is_what_the_competitions_script_joins():
    rows = [line if line.strip() else "" for line in RAW.splitlines(keepends=True)]  # as in the data set
    assert text.join_rows(RAW) == "\n".join(row for row in rows if row.strip())
