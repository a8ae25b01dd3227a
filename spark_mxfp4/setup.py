"""Build option: SPARK_MXFP4_PRECOMPILE=90a,121a puts compiled CUDA kernels into the wheel; without it, sources alone.

Everything else is in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

TARGETS = os.environ.get("SPARK_MXFP4_PRECOMPILE", "").replace(",", " ").split()


class BuildWithKernels(build_py):
    """Copy the package without this file, and compile the kernels beside their sources."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return a package's modules; this file is none."""
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in modules if (module[0], module[1]) != ("spark_mxfp4", "setup")]

    def run(self) -> None:
        """Copy, then compile into the copy."""
        super().run()
        if not TARGETS:
            return
        program = Path(__file__).parent / "kernels" / "precompile.py"  # as a program: the package needs torch
        compiled = Path(self.build_lib).absolute() / "spark_mxfp4" / "kernels" / "compiled"
        shutil.rmtree(compiled, ignore_errors=True)  # an earlier build's: other targets, other sources
        subprocess.run([sys.executable, "-P", program, *TARGETS, "--output", compiled], check=True)


class PlatformWheel(bdist_wheel):
    """A wheel with compiled kernels is for one platform and every Python: they are loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if TARGETS else (python, abi, platform)


class PlatformDistribution(Distribution):
    """Says whether the distribution is for one platform."""

    def has_ext_modules(self) -> bool:
        """Tell whether something in it is compiled."""
        return bool(TARGETS)


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
