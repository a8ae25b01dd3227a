"""The tiny model's folder after a kill, or a failing call, at every step that touches the file system."""

import os
import signal
import sys

import pytest

from sparkforge.core.errors import SparkforgeError
from sparkforge.models import tiny, tiny_trained

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.scandir", "shutil.rmtree"}
REFUSED, UNHARMED = 3, 4


@pytest.fixture
def small(monkeypatch):
    """Replace the megabytes by small files, and leave out syncing, which no kill shows."""
    tiny.TRAINED.sizes()  # read once, from the real file
    monkeypatch.setattr(tiny_trained, "_data", lambda: b"weights")  # hashed several times at each step
    monkeypatch.setattr(tiny, "tokenizer_files", lambda: {"tokenizer.json": b"{}", "vocabulary": b"words"})
    monkeypatch.setattr(tiny, "_weight_files", lambda weights: {"model.safetensors": b"weights"})
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def write(directory, last, harm):
    """Write the model in a process of its own that meets `harm` at step `last`; return how that process ended."""
    child = os.fork()
    if not child:
        steps = 0

        def count(event, _arguments):
            nonlocal steps
            if event in STEPS:
                steps += 1
                if steps == last:
                    harm()

        sys.addaudithook(count)
        code = 1
        try:
            tiny.write_tiny(directory)
            code = UNHARMED if steps < last else 0
        except (SparkforgeError, OSError):
            code = REFUSED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise OSError(5, "Input/output error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "before"),
    [(kill, "absent"), (kill, "empty"), (kill, "damaged"), (kill, "of another recipe"),
     (fail, "absent"), (fail, "damaged")],
)  # fmt: skip
def test_the_next_run_heals_what_a_run_left_at_any_step(small, tmp_path, harm, before):
    code = step = 0
    while code != UNHARMED:
        step += 1
        directory = tmp_path / f"{step}" / "model"
        if before == "empty":
            directory.mkdir(parents=True)
        elif before != "absent":
            tiny.write_tiny(directory, tiny.RANDOM if before == "of another recipe" else tiny.TRAINED)
            (directory / "config.json").write_text("{")
        code = write(directory, step, harm)
        assert code in (0, REFUSED, UNHARMED, -signal.SIGKILL)
        tiny.verify_tiny(tiny.write_tiny(directory))
        assert sorted(path.name for path in directory.parent.iterdir()) == [".model.lock", "model"]
    assert step > 20


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
