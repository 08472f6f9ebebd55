"""What is said in two places is the same in both."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from gpuspill.config import Settings
from gpuspill.manager.statistics import Statistics

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"dask": "dask-core", "xxhash": "python-xxhash", "msgpack": "msgpack-python"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(requirement: str) -> str:
    """``dask[array] >= 1`` -> ``dask-core >=1``."""
    match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*(.*)", requirement)
    assert match is not None, requirement
    name, specifier = match.groups()
    return f"{CONDA_NAMES.get(name, name)} {specifier.replace(' ', '')}".strip()


def requirements(*extras: str) -> set[str]:
    project = PROJECT["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return {normal(requirement) for requirement in wanted}


def recipe() -> dict[str, Any]:
    text = (ROOT / "conda" / "recipe" / "recipe.yaml").read_text()
    context = yaml.safe_load(text)["context"]
    for name, value in context.items():
        text = text.replace(f"${{{{ {name} }}}}", value)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_conda_recipe_says_what_the_project_file_says() -> None:
    made, project = recipe(), PROJECT["project"]
    assert made["package"] == {"name": project["name"], "version": project["version"]}
    assert made["about"]["summary"] == project["description"]
    assert made["about"]["license"] == project["license"]
    python = f"python {project['requires-python']}"
    assert set(made["requirements"]["run"]) == {python, *requirements()}
    build = {normal(requirement) for requirement in PROJECT["build-system"]["requires"]}
    assert build <= set(made["requirements"]["host"])
    entry_points = {tuple(line.split(" = ")) for line in made["build"]["python"]["entry_points"]}
    assert entry_points == set(project["scripts"].items())


def test_the_conda_environment_has_what_the_extras_have() -> None:
    environment = yaml.safe_load((ROOT / "conda" / "environment.yml").read_text())
    *conda, from_pip = environment["dependencies"]
    python = f"python {PROJECT['project']['requires-python']}"
    build = {normal(requirement) for requirement in PROJECT["build-system"]["requires"]}
    wanted = {python, "pip", *build, *requirements("test", "dashboard", "demo")}
    assert {*map(normal, conda), *map(normal, from_pip["pip"])} == wanted


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"`make ([\w-]+)|^\$ make ([\w-]+)", (ROOT / page).read_text(), flags=re.MULTILINE))
        assert {a or b for a, b in named} <= targets, page


def test_every_option_that_a_page_names_exists() -> None:
    options = {field.name.replace("_", "-") for field in fields(Settings)}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"`gpuspill\.([a-z]+(?:-[a-z]+)+)", page.read_text()))
        assert named <= options, page


def test_every_number_that_the_page_on_migrating_names_exists() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text().partition("| looking for | column |")[2]
    named = set(re.findall(r"`([a-z_]+)`", text))
    assert len(named) >= 20
    assert named <= {field.name for field in fields(Statistics)}


def test_every_number_that_the_first_page_names_exists() -> None:
    table = (ROOT / "README.md").read_text().partition("| question | columns |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert len(named) >= 15
    assert named <= {field.name for field in fields(Statistics)}


def test_every_file_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:ci|conda|docs|gpuspill|tests|\.ci)/[\w./-]*)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
