"""The wheel: the command `sparkforge`, and the files that it lays out as a checkout (sparkforge/core/launcher.py).

An editable installation gets the packages where they are. Everything else is in pyproject.toml.
"""

import hashlib
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
COMMAND = (
    "__init__.py", "core/__init__.py", "core/errors.py", "core/paths.py", "core/launcher.py",
)  # fmt: skip
CARRIED = (
    ".dockerignore", "Dockerfile", "Dockerfile.dev", "LICENSE", "README.md", "deploy", "docker-compose.cluster.cpu.yml",
    "docker-compose.cluster.yml", "docker-compose.dev.cpu.yml", "docker-compose.dev.yml", "docker-compose.yml", "inv",
    "locks", "patches", "pins.toml", "pyproject.toml", "setup.py", "spark_mxfp4/LICENSE", "spark_mxfp4/MANIFEST.in",
    "spark_mxfp4/README.md", "spark_mxfp4/pyproject.toml", "spark_mxfp4/setup.py", "spark_mxfp4/src", "sparkforge",
    "validate",
)  # fmt: skip
LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "compiled", "secrets", ".*")


class CommandAndCheckout(build_py):
    """Put the command and the carried files into the wheel, with a list of their hashes."""

    def run(self) -> None:
        """Copy; the build folder may hold what an earlier build left, so it is emptied first."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)
        package = Path(self.build_lib, "sparkforge")
        checkout = package / "checkout"
        for name in (*COMMAND, *CARRIED):
            source, target = (ROOT / "sparkforge", package) if name in COMMAND else (ROOT, checkout)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
            copy(source / name, target / name, **({"ignore": LEFT} if (source / name).is_dir() else {}))
        files = sorted(path for path in checkout.rglob("*") if path.is_file())
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.relative_to(checkout)}\n" for path in files]
        (checkout / ".wheel").write_text("".join(lines), encoding="utf-8")


setup(
    cmdclass={"build_py": CommandAndCheckout},
    # The versions of the lock; what serves is installed by the lock's hashes.
    install_requires=re.findall(
        r"^([\w.-]+==[^\\\n]+?) *\\?$", (ROOT / "locks/tools.txt").read_text("utf-8"), re.MULTILINE
    ),
)
