"""Wheels, folders and reports. The libraries in them hold nothing for a GPU, so no program of CUDA's is asked."""

import base64
import hashlib
import json
import platform
import subprocess
import zipfile
from pathlib import Path

import pytest

from forge.audit import audit
from forge.cubins import Tools
from sparkforge.errors import AuditError, UsageError

pytestmark = pytest.mark.needs("c++")
NONE = Tools(Path("/nonexistent"), Path("/nonexistent"))


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extension")
    source = folder / "one.cpp"
    source.write_text('extern "C" void* PyInit__C() { return nullptr; }\n')
    built = folder / "_C.abi3.so"
    command = ["c++", "-shared", "-fPIC", str(source), "-o", str(built)]
    subprocess.run(command, check=True, capture_output=True)
    return built.read_bytes()


def wheel(folder, content, *, recorded=None, name="_C.abi3.so", machine=None):
    path = folder / f"one-1.0-cp38-abi3-manylinux_2_28_{machine or platform.machine()}.whl"
    digest = hashlib.sha256(content if recorded is None else recorded).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(f"one/{name}", content)
        made.writestr(
            "one-1.0.dist-info/RECORD", f"one/{name},sha256={encoded},{len(content)}\none-1.0.dist-info/RECORD,,\n"
        )
    return path


def rules_of(*paths, **options):
    return [one.rule for one in audit(list(paths), tools=NONE, **options).violations]


def test_wheel_with_the_files_that_it_records(tmp_path, extension):
    report = audit([wheel(tmp_path, extension)], tools=NONE)
    report.require_clean()
    assert [one.path for one in report.binaries] == [f"{wheel(tmp_path, extension).name}/one/_C.abi3.so"]
    assert report.bytes == len(extension)


def test_library_swapped_inside_a_wheel(tmp_path, extension):
    assert rules_of(wheel(tmp_path, extension, recorded=b"another")) == ["swapped-library"]
    assert rules_of(wheel(tmp_path, extension, name="_moe_C.abi3.so")) == ["swapped-library"]
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    assert rules_of(wheel(tmp_path, extension, machine=other)) == ["swapped-library"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_wheel(tmp_path, extension, share):
    path = wheel(tmp_path, extension)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert rules_of(path) == ["damaged"]


def test_damaged_member_of_a_wheel(tmp_path, extension):
    path = wheel(tmp_path, extension)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)
    assert "damaged" in rules_of(path)


def test_folder_is_searched_and_the_error_names_rule_and_fix(tmp_path, extension):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "_C.abi3.so").write_bytes(extension)
    (tmp_path / "deep" / "_D.abi3.so").write_bytes(extension[:1000])
    (tmp_path / "deep" / "notes.txt").write_text("not read")
    report = audit([tmp_path], tools=NONE)
    assert len(report.binaries) == 2
    with pytest.raises(AuditError) as caught:
        report.require_clean()
    assert "1 of 2 files fail the audit (damaged x 1)" in caught.value.what
    assert "_D.abi3.so" in caught.value.why
    assert caught.value.fix == "bring or build the file again"
    assert caught.value.exit_code == 54


def test_report_is_json(tmp_path, extension):
    document = json.loads(json.dumps(audit([wheel(tmp_path, extension)], tools=NONE).document()))
    assert document["violations"] == []
    assert document["files"][0]["host"]["machine"] == platform.machine()


def test_what_has_no_meaning_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for arguments in (
        {"paths": [tmp_path / "none.so"]},
        {"paths": [tmp_path / "a.txt"]},
        {"paths": [], "modules": ["x"]},
    ):
        with pytest.raises(UsageError):
            audit(**arguments, tools=NONE)


def test_missing_module(tmp_path, extension):
    assert rules_of(wheel(tmp_path, extension), modules=["fused_moe_120"]) == ["missing-module"]


def test_nothing_is_no_clean_audit():
    with pytest.raises(UsageError, match="nothing is named"):
        audit([], tools=NONE)
