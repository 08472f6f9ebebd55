"""Check what an sdist and a wheel contain: ``release_contents.py SOURCE SDIST WHEEL``.

Needs the standard library only. Prints each problem, and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from email import message_from_bytes
from pathlib import Path

#: What packagers and reviewers of a release need besides the package.
IN_SDIST = (
    "tests/",
    "docs/",
    "examples/",
    "ci/",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "pyproject.toml",
)


def changelog_problems(text: str, version: str) -> list[str]:
    """Return what is wrong with a changelog, for the release of a version."""
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    if not headings or headings[0] != "Unreleased":
        return ["CHANGELOG.md: the first section has to be 'Unreleased'"]
    problems = []
    if version not in [heading.partition(" ")[0] for heading in headings[1:]]:
        problems.append(f"CHANGELOG.md: there is no section for {version}")
    for heading in headings[1:]:
        match = re.fullmatch(r"[\d.]+\w*(?: - (\d{4}-\d\d-\d\d))?", heading)
        try:
            if match is None:
                raise ValueError
            if match[1]:
                date.fromisoformat(match[1])
        except ValueError:
            problems.append(f"CHANGELOG.md: expected 'VERSION - YYYY-MM-DD', found {heading!r}")
    return problems


def content_problems(tracked: set[str], sdist: set[str], wheel: set[str], info: str) -> list[str]:
    """Return what is missing from, or too much in, an sdist and a wheel, by names of files."""
    package = {name for name in tracked if name.startswith("gpuspill/")}
    problems = [f"the wheel lacks {name}" for name in sorted(package - wheel)]
    problems += [f"the wheel has {name}" for name in sorted(wheel - package) if not name.startswith(f"{info}/")]
    problems += [f"the sdist lacks {name}" for name in sorted(package - sdist)]
    problems += [f"the sdist lacks {name}" for name in IN_SDIST if not any(found.startswith(name) for found in sdist)]
    return problems


def main(source: str, sdist: str, wheel: str) -> int:
    """Print the problems of a release; return how many there are."""
    project = tomllib.loads((Path(source) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    tracked = subprocess.run(["git", "-C", source, "ls-files"], capture_output=True, text=True, check=True)
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as bundle:
        in_wheel = set(bundle.namelist())
        metadata = message_from_bytes(bundle.read(f"{info}/METADATA"))
    problems = content_problems(set(tracked.stdout.splitlines()), in_sdist, in_wheel, info)
    problems += changelog_problems((Path(source) / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if metadata["License-Expression"] != project["license"]:
        problems.append(f"the wheel says of its license {metadata['License-Expression']!r}")
    for problem in problems:
        print(f"error: {problem}")
    if not problems:
        print(f"{len(in_wheel)} files in the wheel, {len(in_sdist)} in the sdist, of version {version}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
