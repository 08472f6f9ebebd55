"""What a page tells a reader to run, runs; what it tells them to type, exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from gpuspill.cli import gpuspill

from .pages import ROOT, Block, blocks, pages

RUNNER = Path(__file__).with_name("pages.py")
WITH_PYTHON = [
    path for path in pages() if any(block.language == "python" for block in blocks(path.read_text(encoding="utf-8")))
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_python_block_runs(page: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(page)],
        cwd=tmp_path,
        env={**environment, "DASK_DISTRIBUTED__DASHBOARD__LINK": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def commands() -> list[tuple[str, str]]:
    """Every line that a page tells a reader to type, with the place where it stands."""
    found = []
    for page in pages():
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "console":
                for number, line in enumerate(block.text.splitlines()):
                    if line.startswith("$ "):
                        found.append((f"{page.relative_to(ROOT)}:{block.line + number}", line[2:]))
    return found


def problem(line: str) -> str | None:
    """Return what is wrong with a command, or None."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        del words[0]
    name, *arguments = words
    if name == "gpuspill":
        return _refused(gpuspill, arguments)
    if name == "dask":
        return _dask(arguments)
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        return next((f"no target {word}" for word in arguments if "=" not in word and word not in targets), None)
    if name == "pip":
        extras = {extra for word in arguments for extra in re.findall(r"^(?:\.|gpuspill)\[([\w,]+)\]", word)}
        unknown = {name for extra in extras for name in extra.split(",")} - PROJECT["optional-dependencies"].keys()
        return f"no extras {unknown}" if unknown else None
    script = arguments[0] if Path(name).name in ("python", "bash", "pytest") and arguments else name
    if script.startswith(("ci/", "examples/", "conda/", ".ci/", "tests/")):
        return None if (ROOT / script).exists() else f"{script} does not exist"
    return None if name in ELSEWHERE else f"{name} is no command that the pages explain"


#: Commands that come from elsewhere.
ELSEWHERE = {"python", "pytest", "docker", "helm", "kubectl", "git", "rattler-build", "cp"}


def _refused(command: click.Command, arguments: list[str]) -> str | None:
    """Return why click would refuse the words after a command."""
    context = click.Context(command, info_name=command.name)
    while isinstance(command, click.Group):
        if not arguments or arguments[0].startswith("-"):
            return None
        chosen = command.get_command(context, arguments[0])
        if chosen is None:
            return f"{command.name} has no command {arguments[0]}"
        command, arguments = chosen, arguments[1:]
    try:
        command.make_context(command.name, list(arguments), parent=context)
    except click.UsageError as error:
        return error.format_message()
    return None


def _dask(arguments: list[str]) -> str | None:
    if arguments[0] == "gpuspill":
        return _refused(gpuspill, arguments[1:])
    if arguments[0] in ("worker", "scheduler"):
        from distributed.cli import dask_scheduler, dask_worker

        command = dask_worker.main if arguments[0] == "worker" else dask_scheduler.main
    elif arguments[0] == "cuda":
        if find_spec("dask_cuda") is None:
            return None
        from gpuspill.distributed.dask_cuda import worker_command

        command, arguments = worker_command(), arguments[1:]
    else:
        return f"dask has no command {arguments[0]}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    return f"no options {used - known}" if used - known else None


def test_every_command_exists() -> None:
    found = commands()
    assert len(found) >= 20
    assert [(place, line, wrong) for place, line in found if (wrong := problem(line))] == []


@pytest.mark.parametrize(
    "line",
    [
        "gpuspill bench persist-sum --arm stock",
        "gpuspill bench persist-sum --repeat 0",
        "gpuspill bench nothing",
        "gpuspill config one two",
        "A=1 dask worker tcp://scheduler:8786 --preloads gpuspill",
        "dask workers",
        "make nothing",
        "pip install '.[nothing]'",
        "ci/absent.sh",
        "python ci/absent.py",
        "strange",
    ],
)
def test_commands_that_do_not_exist_are_found(line: str) -> None:
    assert problem(line) is not None


def test_blocks_hidden_ones_and_those_that_need_something() -> None:
    page = """
```console
$ ls
```
<!-- hidden
a = 1
-->
<!-- skip unless absent_module -->

```python
b = 2
```

* a list:

  ```python
  c = 3
  ```
"""
    assert list(blocks(page)) == [
        Block("console", "$ ls\n", 3),
        Block("python", "a = 1\n", 6),
        Block("python", "c = 3\n", 17),
    ]
