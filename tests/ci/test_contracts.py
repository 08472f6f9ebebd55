"""The contract types of our own find what they are for, and only that."""

import pytest
from grimp import ImportGraph

from ci.contracts import OnlyImportedBy, OnlyImports

IMPORTS = [
    ("package.core.budget", "package.errors"),
    ("package.core.budget", "package.core.policy"),
    ("package.core.policy", "heapq"),
    ("package.shell", "library"),
    ("package.shell", "package.core.budget"),
]


def graph(*more: tuple[str, str]) -> ImportGraph:
    made = ImportGraph()
    for line, (importer, imported) in enumerate([*IMPORTS, *more], start=1):
        made.add_import(importer=importer, imported=imported, line_number=line, line_contents="import")
    return made


def only_imports(allowed: list[str]) -> OnlyImports:
    options = {"modules": ["package.core"], "allowed": allowed}
    return OnlyImports("core", session_options={}, contract_options=options)


def only_imported_by(modules: list[str], importers: list[str]) -> OnlyImportedBy:
    options = {"modules": modules, "importers": importers}
    return OnlyImportedBy("library", session_options={}, contract_options=options)


def test_only_imports_allows_what_is_listed_the_modules_themselves_and_the_standard_library() -> None:
    check = only_imports(["stdlib", "package.errors"]).check(graph(), verbose=False)
    assert check.kept


@pytest.mark.parametrize(
    ("allowed", "offence"),
    [
        (["stdlib"], "package.core.budget imports package.errors (line 1)"),
        (["package.errors"], "package.core.policy imports heapq (line 3)"),
    ],
)
def test_only_imports_finds_what_is_not_listed(allowed: list[str], offence: str) -> None:
    check = only_imports(allowed).check(graph(), verbose=False)
    assert not check.kept
    assert check.metadata["offending"] == [offence]


def test_a_name_that_only_starts_like_an_allowed_one_is_not_allowed() -> None:
    more = ("package.core.policy", "package.errors_of_others")
    check = only_imports(["stdlib", "package.errors"]).check(graph(more), verbose=False)
    assert check.metadata["offending"] == ["package.core.policy imports package.errors_of_others (line 6)"]


def test_only_imported_by_finds_other_importers() -> None:
    assert only_imported_by(["library"], ["package.shell"]).check(graph(), verbose=False).kept
    more = ("package.core.policy", "library.part")
    check = only_imported_by(["library"], ["package.shell"]).check(graph(more), verbose=False)
    assert check.metadata["offending"] == ["package.core.policy imports library.part (line 6)"]


def test_modules_that_do_not_exist_are_no_error() -> None:
    contract = only_imported_by(["absent"], ["package.absent", "another"])
    assert contract.check(graph(), verbose=False).kept
