"""The rules for prose that a program can check.

* No *nobody*, *somebody*, *whoever*, *of which*, *all the same*: say who does what.
* Lines of prose have at most 100 columns: in Markdown, and in comments and docstrings of ``gpuspill``, all but
  tables, code and links.

Checked are the Markdown files, and comments, docstrings and messages in Python files. The tests were written before
the rules: :data:`ALLOWED` says how many words each folder may still have. It may fall, and not rise.

Run by ``ci/lint.sh``; prints each place, and exits with 1 if there is one too many.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

COLUMNS = 100
WORDS = re.compile(r"\b(nobody|somebody|whoever|of which|all the same)\b", re.IGNORECASE)

#: Words that may still be in Python files, by folder.
ALLOWED: Mapping[str, int] = {
    "tests": 118,
}

_FENCE = re.compile(r"^\s*(```|~~~)")
_COMMENT = re.compile(r"^\s*(<!--|-->)")
#: Rows of a table, and examples.
_NO_PROSE = re.compile(r"^\s*(>>>|\.\.\.)|\S {2,}\S|={4}")
_BEGINNINGS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
#: Names of tests and other code, and addresses.
_NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the faults of a Markdown file: line number, and what is wrong."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            code = not code
        elif _COMMENT.match(line):
            code = "<!--" in line and "-->" not in line
        elif not code:
            for word in WORDS.findall(_NAMES.sub("", line)):
                yield number, f"the word {word!r}"
            prose = not line.lstrip().startswith("|") and "](" not in line and "`tests/" not in line
            if prose and len(line) > COLUMNS:
                yield number, f"{len(line)} columns"


def python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the faults of a Python file."""
    for number, line in enumerate(text.splitlines(), 1):
        for word in WORDS.findall(line):
            yield number, f"the word {word!r}"


def wide(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings in a Python file that are too long."""
    lines = text.splitlines()
    begins = True  # a statement
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comment = token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        if comment or (token.type == tokenize.STRING and begins):
            for number in range(token.start[0], token.end[0] + 1):
                line = lines[number - 1]
                if len(line) > COLUMNS and not _NO_PROSE.search(line.strip()):
                    yield number, f"{len(line)} columns"
        begins = token.type in _BEGINNINGS or (begins and token.type in (tokenize.NL, tokenize.COMMENT))


def find(root: Path, files: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the faults of Markdown files, and those of Python files by folder."""
    documents: list[str] = []
    code: dict[str, list[str]] = {}
    for name in files:
        if name in ("ci/prose.py", "tests/ci/test_prose.py"):  # which name the words
            continue
        if name.endswith(".md"):
            text = (root / name).read_text()
            documents += [f"{name}:{number}: {what}" for number, what in markdown(text)]
        elif name.endswith(".py"):
            text = (root / name).read_text()
            faults = [f"{name}:{number}: {what}" for number, what in python(text)]
            if name.startswith("gpuspill/"):
                documents += [f"{name}:{number}: {what}" for number, what in wide(text)]
            code.setdefault(folder(name), []).extend(faults)
    return documents, code


def folder(name: str) -> str:
    """Return the folder under which a Python file is counted: two levels below ``gpuspill``."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "gpuspill" and len(parts) > 2 else parts[0]


def main() -> int:
    """Check all files that git knows."""
    root = Path(__file__).parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
    faults, code = find(root, [name for name in listed.splitlines() if (root / name).exists()])
    for name, found in code.items():
        allowed = ALLOWED.get(name, 0)
        if len(found) > allowed:
            faults += [*found, f"{name}: {len(found)} words, of the {allowed} that ALLOWED in ci/prose.py has"]
    print("\n".join(faults) if faults else "prose: nothing found")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
