"""The commands that the development container's messages, pages and Compose file advise."""

import re
from dataclasses import dataclass

from sparkforge.core.paths import ROOT

# Texts printed inside the container, or read by somebody who works in it.
SOURCES = ("sparkforge/image/dev.py", "sparkforge/compile", "sparkforge/core/process.py", "docker-compose.dev.yml")
PAGE, HEADING = "docs/guide/dev-container.md", "## Work on vLLM, FlashInfer and Triton in a container"
INV = re.compile(r"\./inv ([a-z][\w.-]*)([^\n\"'`;&|#()]*)")
PROGRAM = re.compile(r"[\"'`: ](less|pip|gdb|git|ninja|cmake|docker) ")


@dataclass(frozen=True, order=True)
class Advice:
    """One command of `./inv` with its options, and the file that advises it."""

    file: str
    command: str
    options: tuple[str, ...]


def texts():
    """Yield name and text of each file; of the page, only its section."""
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
    section = (ROOT / PAGE).read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    assert section, f"{PAGE} has no {HEADING}"
    yield PAGE, section


def commands():
    """Return every `./inv` command that is advised, sorted."""
    return sorted(
        {
            Advice(name, match[1].rstrip("."), tuple(re.findall(r"--[a-z][\w-]*", match[2])))
            for name, text in texts()
            for match in INV.finditer(text)
        }
    )
