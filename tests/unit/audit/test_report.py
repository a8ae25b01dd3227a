"""Wheels, folders and reports. Their libraries have no GPU code, so no CUDA program is run."""

import base64
import hashlib
import platform
import shutil
import zipfile
from pathlib import Path

import pytest
from programs import compile_library

from sparkforge.audit import report as audit_report
from sparkforge.audit.cubins import Tools
from sparkforge.audit.report import audit_files, run_audit
from sparkforge.core.errors import AuditError, UsageError

pytestmark = pytest.mark.needs("c++")
RECORD = "one-1.0.dist-info/RECORD"
NONE = Tools(Path("/nonexistent"), Path("/nonexistent"))


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    text = 'extern "C" void* PyInit__C() { return nullptr; }\n'
    return compile_library(tmp_path_factory.mktemp("extension") / "_C.abi3.so", text).read_bytes()


def wheel(folder, content, *, recorded=None, name="_C.abi3.so", machine=None):
    path = folder / f"one-1.0-cp38-abi3-manylinux_2_28_{machine or platform.machine()}.whl"
    digest = hashlib.sha256(content if recorded is None else recorded).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"one/{name}", content)
        archive.writestr(RECORD, f"one/{name},sha256={encoded},{len(content)}\n{RECORD},,\n")
    return path


def rules_of(*paths, **options):
    return [violation.rule for violation in audit_files(list(paths), tools=lambda: NONE, **options).violations]


def test_library_swapped_inside_a_wheel(tmp_path, extension):
    assert rules_of(wheel(tmp_path, extension, recorded=b"another")) == ["swapped-library"]
    assert rules_of(wheel(tmp_path, extension, name="_moe_C.abi3.so")) == ["swapped-library"]
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    assert rules_of(wheel(tmp_path, extension, machine=other)) == ["swapped-library"]


def directory_says(data, offset, value):
    """Return a wheel with another value at `offset` of the first entry of its zip directory."""
    at = data.index(b"PK\x01\x02") + offset
    return data[:at] + value + data[at + len(value) :]


DAMAGED = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte": lambda data: data[: (third := len(data) // 3)] + bytes([data[third] ^ 0xFF]) + data[third + 1 :],
    "a method of packing that nobody knows": lambda data: directory_says(data, 10, (99).to_bytes(2, "little")),
    "more than the directory says": lambda data: directory_says(data, 24, (100).to_bytes(4, "little")),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_wheel_is_a_violation(tmp_path, extension, change):
    path = wheel(tmp_path, extension)
    path.write_bytes(change(path.read_bytes()))
    assert "damaged" in rules_of(path)


def test_folder_is_searched_and_the_error_names_rule_and_fix(tmp_path, extension):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "_C.abi3.so").write_bytes(extension)
    (tmp_path / "deep" / "_D.abi3.so").write_bytes(extension[:1000])
    (tmp_path / "deep" / "notes.txt").write_text("not read")
    report = audit_files([tmp_path], tools=lambda: NONE)
    assert len(report.binaries) == 2
    why = r"^1 of 2 files fail the audit \(damaged x 1\) · .*_D\.abi3\.so.* · get or build the file again$"
    with pytest.raises(AuditError, match=why, check=lambda error: error.exit_code == 54):
        report.require_clean()


def test_an_audit_of_nothing_and_of_what_cannot_be_audited_says_so(tmp_path):
    with pytest.raises(UsageError, match="nothing to audit"):
        run_audit([tmp_path], tools=lambda: NONE)
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(b"PK")
    with pytest.raises(AuditError, match="1 of 1 files fail"):
        run_audit([tmp_path], tools=lambda: NONE)
    (tmp_path / "a.txt").write_text("x")
    for arguments in (
        {"paths": [tmp_path / "none.so"]}, {"paths": [tmp_path / "a.txt"]}, {"paths": []},
        {"paths": [], "modules": ["x"]},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            audit_files(**arguments, tools=lambda: NONE)


def damage_of(path):
    (violation,) = audit_files([path], tools=lambda: NONE).violations
    assert violation.rule == "damaged"
    return violation.detail


def test_members_that_become_too_large_are_not_unpacked(tmp_path, monkeypatch, extension):
    assert "_C.abi3.so expands too far: its" in damage_of(wheel(tmp_path, bytes(65 << 20)))
    monkeypatch.setattr(audit_report, "LARGEST_WHEEL", len(extension))
    assert "once they are unpacked" in damage_of(wheel(tmp_path, extension))


CONTRADICTIONS = {
    "a member twice": ("one/_C.abi3.so", b"again"), "another record": ("two-1.dist-info/RECORD", b"\xff\xfe"),
    "no text": (RECORD, b"\xff"), "a field without end": (RECORD, b'"' + b"x" * 200_000),
    "too long": (RECORD, b"a" * (65 << 20)), "no record": None,
}  # fmt: skip


@pytest.mark.parametrize("member", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_wheel_without_a_sound_record_is_damaged(tmp_path, extension, member):
    path = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one/_C.abi3.so", extension)
        if member:
            archive.writestr(*member)
    assert rules_of(path) == ["damaged"]


def patched_rules(path):
    report = audit_files([path], tools=lambda: NONE)
    details = [violation.detail for violation in report.violations if violation.rule == "patched-wheel"]
    return details, report.document()["wheels"]


def test_a_patched_wheel_is_compared_with_the_lock(patched_site, patched_wheel, tmp_path, capsys):
    (entry,) = patched_wheel.lock.values()
    details, wheels = patched_rules(patched_wheel.path)
    assert details == []
    assert wheels == [{"path": str(patched_wheel.path), "wheel": entry.file, "sha256": entry.sha256,
                       "record": entry.record, "problems": ()}]  # fmt: skip
    copy = tmp_path / patched_wheel.path.name
    copy.write_bytes(patched_wheel.path.read_bytes() + b"\0")
    details, _ = patched_rules(copy)
    assert [detail.partition(", and ")[2] for detail in details] == [f"{entry.sha256} is locked"]
    for path, is_locked in ((patched_wheel.path, True), (copy, False)):
        with pytest.raises(AuditError):  # its library is not a valid ELF file
            run_audit([path], tools=lambda: NONE)
        assert (f"✓ {path}: {entry.file} of locks/patched.toml" in capsys.readouterr().err) is is_locked
    unknown = tmp_path / entry.file.replace("+sparkforge.", "+sparkforge.9")
    shutil.copyfile(patched_wheel.path, unknown)
    assert patched_rules(unknown)[0] == ["locks/patched.toml has no such wheel"]


def test_an_installed_package_is_compared_with_its_wheel(patched_site, patched_wheel):
    (entry,) = patched_wheel.lock.values()
    details, (audited,) = patched_rules(patched_site)
    assert details == []
    assert (audited["wheel"], audited["sha256"], audited["record"]) == (entry.file, entry.sha256, entry.record)
    (patched_site / "vllm/b.py").unlink()
    (patched_site / "vllm/c.py").write_text("")
    details, _ = patched_rules(patched_site)
    assert details == ["vllm/b.py: is missing", "vllm/c.py: was added"]
    (patched_site / f"{Path(audited['path']).name}/RECORD").unlink()
    details, (audited,) = patched_rules(patched_site)
    assert "RECORD cannot be read: No such file" in details[0]
    assert audited["wheel"] == ""
