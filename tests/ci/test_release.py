"""What a release is checked for, and that hosted CI runs what `.ci/run` runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from release_contents import changelog_problems, content_problems

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert changelog_problems((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), PROJECT["version"]) == []


def test_what_is_wrong_with_a_changelog_is_said() -> None:
    good = "# Changelog\n## Unreleased\n### Added\n## 1.1 - 2026-01-31\n## 1.0\n"
    assert changelog_problems(good, "1.1") == []
    (problem,) = changelog_problems(good, "1.2")
    assert "no section for 1.2" in problem
    (problem,) = changelog_problems(good.replace("01-31", "02-31"), "1.1")
    assert "found '1.1 - 2026-02-31'" in problem
    (problem,) = changelog_problems("## 1.0\n", "1.0")
    assert "'Unreleased'" in problem


def test_what_is_missing_in_a_release_and_what_is_too_much_is_said() -> None:
    tracked = {"gpuspill/a.py", "gpuspill/py.typed", "tests/test_a.py"}
    others = {"tests/x", "docs/x", "examples/x", "ci/x", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"}
    sdist = {"gpuspill/a.py", "gpuspill/py.typed", "pyproject.toml", *others}
    wheel = {"gpuspill/a.py", "gpuspill/py.typed", "i/METADATA"}
    assert content_problems(tracked, sdist, wheel, "i") == []
    assert content_problems(tracked, sdist - {"LICENSE"}, wheel, "i") == ["the sdist lacks LICENSE"]
    assert content_problems(tracked, sdist, {"gpuspill/a.py", "tests/x"}, "i") == [
        "the wheel lacks gpuspill/py.typed",
        "the wheel has tests/x",
    ]


def load(workflow: Path) -> Any:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_hosted_ci_runs_scripts_that_exist(workflow: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, job in load(workflow)["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        for step in job["steps"]:
            command = step.get("run", "grep").split()
            if command[0] == "make":
                assert command[1] in targets, command
            elif command[0] != "grep":
                assert (ROOT / command[0]).exists(), command


def test_hosted_ci_runs_what_ci_runs_on_every_python_that_is_claimed() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    run = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    ours = set(re.findall(r"^make \S+", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert ours
    assert ours <= run
    claimed = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert claimed <= set(jobs["test"]["strategy"]["matrix"]["python"])


def test_hosted_ci_tests_the_oldest_and_the_newest_releases() -> None:
    arms = load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["releases"]["strategy"]["matrix"]["arm"]
    script = (ROOT / "ci" / "nightly.sh").read_text(encoding="utf-8")
    (default,) = re.findall(r"\|\| set -- (.*)$", script, flags=re.MULTILINE)
    assert arms == default.split()
