"""The tree of an image: what is left out, what is judged, what it says of itself."""

import base64
import hashlib
import json
import sys
import venv
from types import SimpleNamespace

import pytest

from forge import locks, rootfs, trimming
from forge.rootfs import Tree
from forge.trimming import Cut
from sparkforge.errors import ImageTreeError


def put(packages, name, files):
    """Write a package as a wheel's installer does, with its record."""
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
    made = Tree(tmp_path / "venv", rootfs.CPU)
    packages = made.root / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/embedded.txt").write_text("# made\nalpha==1.0 \\\n    --hash=sha256:00\nBeta.Two[extra]==1.0\n")
    monkeypatch.setattr(locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(rootfs, "queues", lambda device, table: iter(()))
    monkeypatch.setattr(trimming, "TABLE", tmp_path / "trim.toml")
    (tmp_path / "trim.toml").write_text("[cpu.big]\npaths = ['alpha/big*']\nwhy = 'too large'\n")
    put(packages, "alpha", {"alpha/__init__.py": b"x = {'a', 'b'}\n", "alpha/big.so": b"B" * 100})
    return made


def test_what_is_as_its_record_says_passes_and_is_counted(tree):
    assert rootfs.verify(tree) == 1  # big.so is left out by the table, whether it is there or not


def test_one_changed_byte_is_named(tree):
    (tree.packages / "alpha/__init__.py").write_bytes(b"x = {'a', 'c'}\n")
    with pytest.raises(ImageTreeError, match=r"alpha/__init__\.py differs from its wheel"):
        rootfs.verify(tree)


def test_a_missing_file_is_named(tree):
    (tree.packages / "alpha/__init__.py").unlink()
    with pytest.raises(ImageTreeError, match=r"alpha/__init__\.py is missing"):
        rootfs.verify(tree)


def test_a_package_that_no_lock_has_is_refused(tree):
    put(tree.packages, "gamma", {"gamma.py": b""})
    with pytest.raises(ImageTreeError, match="gamma is in no lock"):
        rootfs.verify(tree)


def test_names_are_compared_as_indexes_do(tree):
    put(tree.packages, "beta_two", {"beta.py": b""})
    assert rootfs.verify(tree) == 2


def test_what_the_table_names_goes_and_its_bytes_are_told(tree):
    assert trimming.trim(tree.packages, trimming.cuts(rootfs.CPU)) == {"big": 100}
    assert not (tree.packages / "alpha/big.so").exists()


def test_a_path_that_matches_nothing_stops_the_build(tree):
    with pytest.raises(ImageTreeError, match="matches nothing"):
        trimming.trim(tree.packages, [Cut("gone", ("alpha/none*",), "")])


def test_a_folder_is_cut_with_all_below_it():
    chosen = [Cut("x", ("vllm/third_party/deep_gemm",), ""), Cut("y", ("nccl/*/lib/cu12",), "")]
    assert trimming.is_cut("vllm/third_party/deep_gemm/include/a.h", chosen)
    assert trimming.is_cut("nccl/ep/lib/cu12/x.so", chosen)
    assert not trimming.is_cut("vllm/third_party/deep_gemm_two/a.h", chosen)
    assert not trimming.is_cut("nccl/ep/lib/cu13/x.so", chosen)


def test_a_cut_begins_at_site_packages():
    chosen = [Cut("x", ("nccl", "cudnn/*.so"), "")]
    assert trimming.is_cut("nccl/core/a.py", chosen)
    assert not trimming.is_cut("nvidia/nccl/lib/libnccl.so.2", chosen)
    assert not trimming.is_cut("nvidia/cudnn/lib.so", chosen)


def test_every_cut_has_a_reason():
    table = trimming.ROOT / "deploy/trim.toml"
    assert all(len(cut.why) > 20 and cut.paths for cut in trimming.cuts(rootfs.CUDA, table))


def test_bytecode_is_the_same_whatever_was_compiled_at_once(tmp_path):
    found = []
    for jobs in (1, 3):
        root = tmp_path / "venv"
        venv.create(root, symlinks=True)
        made = Tree(root, rootfs.CPU)
        for name in "abcdef":
            package = made.packages / name
            package.mkdir()
            (package / "__init__.py").write_text(f"def f(x):\n    return x in {{'one', 'two', '{name}'}}\n")
        rootfs.compile_bytecode(made, jobs)
        found.append({path.name + path.parent.parent.name: path.read_bytes() for path in made.packages.rglob("*.pyc")})
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        root.rmdir()
    assert len(found[0]) == 6
    assert found[0] == found[1]
    flags = next(iter(found[0].values()))[4:8]
    assert int.from_bytes(flags, "little") == 0b01  # hash-based, unchecked (PEP 552)


def test_what_starts_with_every_process_leaves_no_bytecode_with_times(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    venv.create(tmp_path / "venv", symlinks=True)
    made = Tree(tmp_path / "venv", rootfs.CPU)
    (made.packages / "hack").mkdir()
    (made.packages / "hack/__init__.py").write_text("x = 1\n")
    (made.packages / "a.pth").write_text("import hack\n")
    rootfs.compile_bytecode(made, 1)
    (bytecode,) = made.packages.rglob("*.pyc")
    assert int.from_bytes(bytecode.read_bytes()[4:8], "little") == 0b01


def test_a_record_forgets_what_is_not_kept_and_only_that(tree, monkeypatch):
    monkeypatch.setattr(rootfs, "compile_bytecode", lambda *_: None)
    record = tree.packages / "alpha-1.0.dist-info/RECORD"
    before = record.read_text()
    (record.parent / "uv_cache.json").write_text('{"timestamp": "now"}')
    record.write_text("alpha-1.0.dist-info/uv_cache.json,sha256=AA,20\n" + before)
    rootfs.finish(tree, 1)
    assert record.read_text() == before
    assert not (record.parent / "uv_cache.json").exists()


def test_kernels_go_where_flashinfer_loads_them_as_they_are(tree, tmp_path):
    module = tmp_path / "built/.cache/flashinfer/0.7.0.post1/121a/cached_ops/xqa/xqa.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"code")
    rootfs.take_kernels(tree, tmp_path / "built")
    assert (tree.packages / "flashinfer/data/aot/xqa/xqa.so").read_bytes() == b"code"


def test_no_kernels_is_no_image(tree, tmp_path):
    with pytest.raises(ImageTreeError, match="no kernels"):
        rootfs.take_kernels(tree, tmp_path)


def test_the_plugins_and_the_checkout_are_known_to_python(tree):
    rootfs.name_project(tree.packages)
    entry = (tree.packages / "sparkforge-0.1.0.dist-info/entry_points.txt").read_text()
    assert entry == "[vllm.general_plugins]\nspark_mxfp4 = spark_mxfp4.vllm_plugin:register\n"
    assert (tree.packages / "sparkforge.pth").read_text().strip() == str(rootfs.ROOT)


def test_the_key_follows_the_contents(tree):
    first, again = rootfs.describe(tree), rootfs.describe(tree)
    assert first == again
    put(tree.packages, "beta_two", {"beta.py": b""})
    assert rootfs.describe(tree)["key"] != first["key"]
    assert json.dumps(first)


def test_the_audit_lies_beside_the_manifest_which_names_it_by_hash(tree, tmp_path):
    manifest, report = tmp_path / "image.json", tmp_path / "audit.json"
    words = ["verify", "--device", "cpu", "--tree", str(tree.root), "--describe", str(manifest)]
    assert rootfs.main(words) == 0
    assert json.loads(report.read_text()) == {"files": 1, "code": {}}
    named = json.loads(manifest.read_text())["audit"]
    assert named == {"audit.json": hashlib.sha256(report.read_bytes()).hexdigest()}
    report.unlink()
    (tree.packages / "alpha/__init__.py").write_bytes(b"")
    assert rootfs.main(words) != 0
    assert not report.exists()


def test_the_report_on_machine_code_says_nothing_that_differs_from_build_to_build(tree, monkeypatch):
    def show(files, *, machine, output):
        found = {"seconds": 1.5, "mb_per_second": 70, "violations": [], "files": [str(path) for path in files]}
        output.write_text(json.dumps(found))

    module = tree.packages / "flashinfer/data/aot/xqa/xqa.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"code")
    monkeypatch.setattr(rootfs, "room", lambda name: {"forge.audit": SimpleNamespace(show=show)}[name])
    cuda = Tree(tree.root, rootfs.CUDA)
    assert rootfs.judge(cuda) == {"violations": [], "files": [str(module)]}


@pytest.mark.parametrize("held", [[], ["cutlass"]])
def test_vllm_is_compiled_from_the_bundle_if_there_is_one(tree, tmp_path, monkeypatch, held):
    asked, bundle = [], tmp_path / "bundle"
    bundle.mkdir()
    for name in held:
        (bundle / name).mkdir()
    rooms = {
        "forge.vllm_build": SimpleNamespace(show=lambda *words: asked.append(words) or "the overlay"),
        "forge.vllm_overlay": SimpleNamespace(show_put=lambda *words: asked.append(words)),
    }
    monkeypatch.setattr(rootfs, "room", rooms.__getitem__)
    monkeypatch.setenv("CUDA_HOME", "")
    rootfs.compile_vllm(tree, bundle, "spinloop", "3")
    where = str(bundle) if held else ""
    assert asked[0] == ("spinloop", where, "3", "12.1a", str(tree.python), "")
    assert asked[1] == ("the overlay", str(tree.packages))


@pytest.mark.parametrize(("words", "code"), [(["finish", "--device", "cpu", "--jobs", "many"], 2)])
def test_a_word_without_meaning_is_an_error_of_ours(words, code, capsys):
    assert rootfs.main(words) == code
    assert "many" in capsys.readouterr().err
