"""The code blocks of a page, and running them: ``python pages.py PAGE``.

The Python blocks of a page are one program, from its top to its end, with two kinds of comments between them that a
reader does not see:

``<!-- hidden ... -->``
    Code: what the page takes for granted, and what has to be true at this place.
``<!-- skip unless MODULE -->``
    The next block is run only where a module can be imported.

Run as a script, since workers in processes of their own import the script that started them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]

_PARTS = re.compile(
    r"^ *```(?P<language>\w+)\n(?P<code>.*?)^ *```$"
    r"|^<!-- hidden\n(?P<hidden>.*?)^-->$"
    r"|^<!-- skip unless (?P<module>[\w.]+) -->$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Every page that is kept by hand."""
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    found = [*(ROOT / name for name in names), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in found if path.exists() and "_build" not in path.parts)


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page that can be used here, hidden ones as Python, in order."""
    wanted = True
    for match in _PARTS.finditer(text):
        if match["module"]:
            wanted = find_spec(match["module"]) is not None
            continue
        group = "hidden" if match["hidden"] is not None else "code"
        line = text.count("\n", 0, match.start(group)) + 1
        language = "python" if group == "hidden" else match["language"]
        if wanted or language != "python":
            yield Block(language, dedent(match[group]), line)
        wanted = wanted or language == "python"


def run(path: Path) -> None:
    """Run the Python blocks of a page, one after another, in one namespace."""
    namespace = {"__name__": "__main__"}
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            source = "\n" * (block.line - 1) + block.text  # so that tracebacks name lines of the page
            exec(compile(source, str(path), "exec"), namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
