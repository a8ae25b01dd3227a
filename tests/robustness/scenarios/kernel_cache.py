"""Remove modules from FlashInfer's kernel cache, after a removal that was killed half-way."""

from robustness.scenario import BUSY, Scenario, write
from sparkforge.compile import cache

NINJA = """\
rule compile
  command = c++ -c $in -o $out
build page.o: compile {source}
build {name}.so: link page.o
"""


def _module(work, name, source_name):
    folder = work / "cache-of-kernels/0.7.0.post1/121a/cached_ops" / name
    source = write(work / "csrc" / source_name, "int x;\n")
    write(folder / "build.ninja", NINJA.format(name=name, source=source))
    write(folder / f"{name}.so", "library" * 100)
    write(folder / "parts/page.o", "object")


def _prepare(work):
    for name in ("page", "rope", "sampling"):
        _module(work, name, "other.cu" if name == "sampling" else "page.cu")
    ops = work / "cache-of-kernels/0.7.0.post1/121a/cached_ops"
    write(ops / f".old.1{cache.REMOVING}/page.o", "object")
    write(ops / "mine/mine.txt", "mine")
    write(ops / "tmp/page.lock", "")


def _act(work):
    cache.clean(cache.Selection(changed=[work / "csrc/page.cu"]), root=work / "cache-of-kernels")


def _judge(work):
    """Every module is complete or absent, and the module that was not selected stays."""
    modules = cache.modules(work / "cache-of-kernels")
    assert "sampling" in {module.name for module in modules}
    for module in modules:
        assert (module.path / "parts/page.o").read_text() == "object", module
        assert (module.path / f"{module.name}.so").exists(), module


SCENARIOS = [Scenario("clean-cache", _prepare, _act, _judge, races=(0, BUSY), cost=4.0)]
