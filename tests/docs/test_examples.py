"""Every example runs, or says why it does not, and has a page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuspill.config import Settings

from .pages import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.py"), EXAMPLES / "container" / "job.py"])
PROJECTS = sorted({path.parent for path in EXAMPLES.glob("*/pyproject.toml")})


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DASK_", "PYTEST_"))}
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_it_runs(script: Path, tmp_path: Path) -> None:
    done = run([sys.executable, str(script)], tmp_path)
    if done.returncode == 1 and done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_projects_own_tests_pass(project: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(project, tmp_path / project.name)
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], copy)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)


def test_every_example_has_a_page() -> None:
    shown = set()
    for page in (ROOT / "docs" / "examples").glob("*.md"):
        shown.update(re.findall(r"^```\{example\} (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    tracked = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.is_file()
        and path.name != "ruff.toml"
        and not any(part.startswith((".", "__")) for part in path.relative_to(EXAMPLES).parts)
    }
    assert shown == tracked


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def check_variables(variables: dict[str, str]) -> None:
    """Fail if a variable means no option of gpuspill, or has a value that no worker can use."""
    prefix = "DASK_GPUSPILL__"
    named = {name.removeprefix(prefix).lower(): value for name, value in variables.items() if name.startswith(prefix)}
    assert named
    Settings.load(**named)


def test_the_values_for_kubernetes_mean_something() -> None:
    worker = load("kubernetes/values.yaml")["worker"]
    check_variables({variable["name"]: variable["value"] for variable in worker["env"]})
    assert worker["extraArgs"] == ["--preload", "gpuspill"]
    volumes = {volume["name"] for volume in worker["mounts"]["volumes"]}
    assert {mount["name"] for mount in worker["mounts"]["volumeMounts"]} == volumes


def test_the_configuration_of_job_queues_makes_a_job_with_gpuspill() -> None:
    jobqueue = pytest.importorskip("dask_jobqueue")
    import dask

    with dask.config.set(dask.config.merge(dask.config.config, load("jobqueue/jobqueue.yaml"))):
        job = jobqueue.SLURMCluster.job_cls(scheduler="tcp://scheduler:8786", name="worker", config_name="slurm")
    script = job.job_script()
    assert "--preload gpuspill" in script
    assert "--local-directory $TMPDIR" in script
    check_variables(dict(re.findall(r"export (\w+)=(\S+)", script)))


def test_the_container_has_what_the_job_asks_for() -> None:
    job = load("container/compose.yaml")["services"]["job"]
    source = (EXAMPLES / "container" / "job.py").read_text(encoding="utf-8")
    assert set(job["environment"]) == set(re.findall(r'environ\.get\("(\w+)"\)', source))
    (volume,) = job["volumes"]
    assert volume.endswith(":" + job["environment"]["SPILL"])
    copied = re.findall(r"^COPY (.*) \S+$", (EXAMPLES / "container" / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert [path for paths in copied for path in paths.split() if not (ROOT / path).exists()] == []
    if shutil.which("docker") and run(["docker", "compose", "version"], ROOT).returncode == 0:
        done = run(["docker", "compose", "--file", "examples/container/compose.yaml", "config", "--quiet"], ROOT)
        assert done.returncode == 0, done.stdout
