"""A small FlashInfer, with a real interpreter, ninja and C++ compiler, and an order to build its one module."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import write_files, write_program

from sparkforge.audit.report import AuditReport
from sparkforge.compile.flashinfer import build, sets
from sparkforge.compile.flashinfer.build import KernelEnvironment, KernelOrder
from sparkforge.compile.flashinfer.sets import KernelModule
from sparkforge.compile.toolchain import Toolchain
from sparkforge.core.files import write_json

# Importing its packages' __init__ fails, as with the real FlashInfer on a machine without a GPU.
GENERATOR = """
import os
from pathlib import Path
RULES = '''
rule compile
  command = {launcher} c++ -MMD -MF $out.d -fPIC -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {link}
'''
class Spec:
    def __init__(self, name, link):
        self.name, self.link = name, link
        base = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
        self.build_dir = base / ".cache/flashinfer/0.7.0.post1/121a/cached_ops" / name
    def write_ninja(self):
        self.build_dir.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).parent
        lines = [RULES.format(launcher=os.environ["FLASHINFER_CXX_LAUNCHER"], link=self.link)]
        objects = [f"{self.build_dir}/csrc_{file}.o" for file in ("one", "two")]
        lines += [f"build {o}: compile {source}/{f}.cpp" for o, f in zip(objects, ("one", "two"))]
        lines += [f"build {self.build_dir}/{self.name}.so: link " + " ".join(objects), ""]
        text = "\\n".join(lines)
        if not (self.build_dir / "build.ninja").exists() or (self.build_dir / "build.ninja").read_text() != text:
            (self.build_dir / "build.ninja").write_text(text)
def gen_module(name="tiny", link="c++ -shared $in -o $out"):
    return Spec(name, link)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site-packages with the small FlashInfer, its interpreter, and an order to build its one module."""
    packages = tmp_path / "lib/site-packages"
    jit = packages / "flashinfer/jit"
    one, two = '#include "one.h"\nint first() { return one(); }\n', "int second() { return 2; }\n"
    files = {"small.py": GENERATOR, "one.h": "inline int one() { return 1; }\n", "one.cpp": one, "two.cpp": two}
    write_files(jit, {**files, **dict.fromkeys(("__init__.py", "../__init__.py"), "raise RuntimeError('no GPU')\n")})
    for name, version in (("flashinfer_python", "0.7.0.post1"), ("torch", "2.13.0"), ("apache_tvm_ffi", "0.1.11")):
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write_files(packages, {f"{name}-{version}.dist-info/METADATA": text})
    python = write_program(tmp_path / "bin/python", f'PYTHONPATH={packages} exec {sys.executable} -S "$@"')
    programs = {name: Path(shutil.which(name)) for name in ("c++", "ninja", "env")}
    versions = {"nvcc": "0", "c++": "0", "glibc": "2.36"}
    chain = Toolchain(tmp_path, "test", programs["c++"], programs["ninja"], programs["env"], versions)
    where = KernelEnvironment(python, packages, {"flashinfer-python": "0.7.0.post1"}, "include", "queue")
    module = KernelModule(name="tiny", sets=(), call="", generator="flashinfer.jit.small:gen_module", audit="sampling")
    order = KernelOrder(sets.load("0.7.0.post1"), "tiny", (module,), "12.1a", tmp_path / "out", where, chain)
    clean = AuditReport((), (), (), (), 0, 0.0)

    def audit(order, _libraries):  # the audit is tested separately, and needs CUDA's tools
        write_json(order.output / f"audit-{order.set_name}.json", clean.document())
        return clean

    monkeypatch.setattr(build, "_audit", audit)
    library = order.output / ".cache/flashinfer/0.7.0.post1/121a/cached_ops/tiny/tiny.so"
    return SimpleNamespace(order=order, jit=jit, python=python, library=library, module=module)
