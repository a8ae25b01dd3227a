"""`./inv` as a user runs it: help, the list, errors, old names, and paths from another folder."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from terminal import Terminal

from sparkforge.cli import namespace, program
from sparkforge.core.errors import UsageError
from sparkforge.core.paths import ROOT


@pytest.fixture
def inv(tmp_path, monkeypatch, capsys):
    """Run the program of `./inv` in this process, on a terminal of 80 columns."""

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            code = program.main(arguments)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    return run


def test_the_list_fits_one_screen_and_names_every_group(inv):
    result = inv("--list")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert len(lines) <= 44
    assert max(map(len, lines)) <= 80
    assert [line[:-1] for line in lines if line.endswith(":")] == list(program.GROUPS)


def test_every_command_is_in_one_group_and_each_group_can_be_listed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [
        line.split()[0] for group in program.GROUPS for line in program.listing(group).splitlines() if line[2] != " "
    ]
    assert len(names) == len(set(names))
    assert {namespace[name] for name in names} == {namespace[name] for name in namespace.task_names}
    assert "bench.acc" in program.listing("bench")
    with pytest.raises(UsageError, match="bench"):
        program.listing("bensh")


def test_help_shows_the_name_that_was_typed_and_an_example(inv):
    out = inv("build.all", "--help").stdout
    assert out.startswith("Usage: ./inv build.all [OPTIONS]\n")
    assert "Example:\n  ./inv build" in out


# Output of the program, of a command, and an error; the reader of one stream or of both is gone.
@pytest.mark.parametrize(
    ("arguments", "both"), [(("--list",), False), (("plan", "gpt-oss-120b", "--json"), True), (("lgos",), False)]
)
def test_a_closed_pipe_ends_quietly_with_the_code_of_sigpipe(arguments, both, tmp_path):
    """As with `./inv … 2>&1 | head`, the reader is gone before the first line is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "errors").open("wb") as errors:
        stdout, stderr = (errors, writer) if arguments == ("lgos",) else (writer, errors)
        code = subprocess.call([ROOT / "inv", *arguments], stdout=stdout, stderr=writer if both else stderr)
    os.close(writer)
    assert code == 128 + signal.SIGPIPE
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "failure", "fix"),
    [
        (("lgos",), "there is no command 'lgos'", "./inv logs"),
        (("zzyzx",), "there is no command 'zzyzx'", "./inv --list"),
        (("up", "--prot", "1"), "./inv up has no option --prot", "./inv up --port 1"),
        (("down", "now"), "'now' has no meaning here", "./inv down --help"),
        (("up", "--port"), "--port cannot be read", "./inv up --help"),
        (("bundle.unpack",), "./inv bundle.unpack needs FILE FOLDER", "./inv bundle.unpack --help"),
        (("status", "--", "-x"), "./inv status takes no words after --", "./inv status --help"),
        (("--lsit",), "there is no option --lsit", "./inv --help"),
    ],
    ids=str,
)
def test_a_mistake_gets_three_parts_and_the_nearest_name(capsys, arguments, failure, fix):
    assert program.main(arguments) == UsageError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"✗ {failure} [usage]"
    assert lines[1].startswith("  why:  ")
    assert lines[2] == f"  next: {fix}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "--device", "embedded", "--model", "here"), ("up", "--device", "docker-cpu", "--model", "here"),
        ("up", "--device", "embedded", "--api-key-file", "here"), ("up", "--offline", "here"),
        ("doctor", "--log", "here"), ("plan", "./here"), ("audit", "here"), ("bench.compare", "here", "here"),
        ("bundle.unpack", "here", "there"), ("pull", "openai/gpt-oss-20b", "--mirror", "here"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_relative_path_starts_in_the_callers_folder(arguments, tmp_path, monkeypatch, capsys):
    """`./inv` changes to the checkout's folder, which has no file of that name."""
    monkeypatch.setenv("INV_CWD", str(tmp_path))
    assert program.main(arguments) not in {0, 1}
    assert str(tmp_path / "here") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "failure", "platform"),
    [
        (("--platform", "linux/amd64"), "--platform is for images", "linux/amd64"),
        (("--platform", "linux/arm64", "--engine", "native"), "--platform is for images", "linux/arm64"),
        (("--platform", "a b"), "--platform 'a b' is not known", "linux/arm64"),
        (("--platform", "foo", "--engine", "docker"), "--platform 'foo' is not known", "linux/arm64"),
    ],
    ids=str,
)
def test_only_docker_builds_an_image_for_another_platform(capsys, options, failure, platform):
    assert program.main(("build", *options)) == UsageError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"✗ {failure} [usage]"
    assert lines[2:] == [f"  next: ./inv build --engine docker --platform {platform}"]


@pytest.mark.parametrize(
    ("variables", "arguments", "fix"),
    [
        (
            {"TP": "0"},
            ("up", "--device", "embedded", "--profiler", "--no-tiny-first", "--port", "8001"),
            "TP=1 ./inv up --device embedded --port 8001 --profiler --no-tiny-first   # or --device docker",
        ),
        ({"BUILD_JOBS": "no"}, ("build.kernels",), "env -u BUILD_JOBS ./inv build.kernels   # or --jobs 4"),
        ({}, ("build.kernels", "--jobs", "no", "--arch", "12.1a"), "./inv build.kernels --arch 12.1a --jobs auto"),
        ({}, ("bench.compare", "a b"), "./inv bench.compare --help"),
    ],
    ids=str,
)
def test_an_advised_change_is_printed_as_the_whole_command(monkeypatch, capsys, variables, arguments, fix):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert program.main(arguments) != 0
    assert capsys.readouterr().err.splitlines()[-1] == f"  next: {fix}"


def test_only_a_command_that_needs_the_state_folder_refuses_an_unusable_one(inv, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_STATE", "/dev/null/none")
    assert [inv(name).returncode for name in ("models", "logs")] == [0, 28]


def test_two_words_are_the_command_with_a_dot(inv):
    assert inv("service", "install", "--help").stdout == inv("service.install", "--help").stdout
    result = inv("build", "kernels")
    assert result.returncode == UsageError.exit_code
    assert "./inv build.kernels" in result.stderr


def test_output_into_a_file_on_a_full_disk_is_an_error_of_three_lines():
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device that has no room
        result = subprocess.run([ROOT / "inv", "--list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 28
    assert "[storage.full]" in result.stderr
    assert len(result.stderr.splitlines()) == 3


@pytest.mark.needs("bash", "zsh")
@pytest.mark.parametrize("shell", [("bash", "--norc", "-i"), ("zsh", "-f", "-i")], ids=lambda words: words[0])
def test_a_shell_completes_commands_and_options(shell, tmp_path):
    terminal = Terminal(shutil.which(shell[0]), *shell[1:], cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)})
    terminal.type(f'eval "$(./inv --print-completion-script {shell[0]})"; echo re"ady"\r')
    terminal.expect("ready")
    terminal.type("./inv roll\t")
    terminal.expect("rollback")
    terminal.type("--t\t")
    terminal.expect("--to")
    terminal.process.kill()
    terminal.process.wait()


def test_no_color_is_respected(tmp_path):
    texts = {}
    for no_color in ("", "1"):
        terminal = Terminal(ROOT / "inv", "upp", cwd=tmp_path, env={**os.environ, "NO_COLOR": no_color})
        terminal.expect("next: ./inv up")
        texts[no_color] = terminal.text
        assert terminal.end() == 2
    assert "31m" in texts[""]
    assert "31m" not in texts["1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("up --device x", "unknown device 'x'"),
        ("up --recipe x", "there is no recipe 'x'"),
        ("chat Hello", "no server is running"),
    ],
)
def test_invoke_itself_runs_the_commands(arguments, said):
    command = [sys.executable, "-m", "invoke", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert said in done.stderr
