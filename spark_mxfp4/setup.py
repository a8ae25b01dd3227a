"""Build option: SPARK_MXFP4_PRECOMPILE=90a,121a adds compiled CUDA kernels to the wheel, which else has only sources.

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
    """Copy the package, and compile the kernels into its folder of kernels."""

    def run(self) -> None:
        """Copy, then compile into the copy."""
        super().run()
        if not TARGETS:
            return
        kernels = Path(__file__).parent / "src" / "spark_mxfp4" / "kernels"
        compiled = Path(self.build_lib).absolute() / "spark_mxfp4" / "kernels" / "compiled"
        shutil.rmtree(compiled, ignore_errors=True)  # may be from an earlier build with other targets or sources
        subprocess.run([sys.executable, "-P", kernels / "precompile.py", *TARGETS, "--output", compiled], check=True)


class PlatformWheel(bdist_wheel):
    """A wheel with compiled kernels is for one platform and every Python, because ctypes loads the kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if TARGETS else (python, abi, platform)


class PlatformDistribution(Distribution):
    """Says whether the distribution is for one platform."""

    def has_ext_modules(self) -> bool:
        """Tell whether the distribution contains compiled kernels."""
        return bool(TARGETS)


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
