"""The tiny model's folder: a manifest of another shape, a stranger's file, a folder that cannot be made."""

import os

import pytest

from sparkforge.models import tiny, tiny_trained


@pytest.fixture
def small(monkeypatch):
    """Replace the megabytes by small files, and leave out syncing, which no kill shows."""
    tiny.TRAINED.sizes()  # read once, from the real file
    monkeypatch.setattr(tiny_trained, "_data", lambda: b"weights")  # hashed several times at each step
    monkeypatch.setattr(tiny, "tokenizer_files", lambda: {"tokenizer.json": b"{}", "vocabulary": b"words"})
    monkeypatch.setattr(tiny, "_weight_files", lambda weights: {"model.safetensors": b"weights"})
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("entry", ["1", "{}", '{"size": 2}', "null", '{"size": 2, "sha256": 5}'])
def test_a_manifest_of_another_shape_is_a_broken_model(small, tmp_path, entry):
    directory = tiny.write_tiny(tmp_path / "model")
    recipe = tiny.TRAINED.recipe()
    (directory / tiny.MANIFEST).write_text(f'{{"recipe": "{recipe}", "files": {{"config.json": {entry}}}}}')
    tiny.verify_tiny(tiny.write_tiny(directory))


def test_a_file_of_someone_else_beside_it_stays(small, tmp_path):
    beside = tmp_path / ".model.mine.tmp"
    beside.write_text("mine")
    tiny.write_tiny(tmp_path / "model")
    assert beside.read_text() == "mine"


def test_the_command_tells_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tiny.main([str(tmp_path / "file" / "model")]) == 28
    assert f"cannot use {tmp_path / 'file'}" in capsys.readouterr().err
