"""Two kinds of import-linter contract that the built-in ones do not cover.

Both look at direct imports only (the layers contract in ``pyproject.toml`` covers chains), and
both may name modules that do not exist: an optional adapter, or a library that is not imported yet,
is no error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


def _within(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _names(field: object) -> list[str]:
    return list(cast("list[str] | None", field) or [])


def _offending(graph: ImportGraph, importer: str, imported: str) -> str:
    details = graph.get_import_details(importer=importer, imported=imported)
    lines = {detail["line_number"] for detail in details}
    return f"{importer} imports {imported} (line {', '.join(map(str, sorted(lines)))})"


class _DirectImports(Contract):
    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["offending"]:
            output.print_error(line, bold=False)
        output.new_line()


class OnlyImports(_DirectImports):
    """Modules that may import nothing but what is listed.

    Options
    -------
    modules
        The modules the contract is about, with all they contain. They may import each other.
    allowed
        What else they may import; ``stdlib`` stands for the standard library.
    """

    type_name = "only_imports"

    modules = fields.ListField(subfield=fields.StringField())
    allowed = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Collect every direct import that is not allowed."""
        del verbose
        modules = _names(self.modules)
        allowed = _names(self.allowed)
        if "stdlib" in allowed:
            allowed += sorted(sys.stdlib_module_names)
        offending = [
            _offending(graph, importer, imported)
            for importer in sorted(graph.modules)
            if _within(importer, modules)
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if not _within(imported, modules + allowed)
        ]
        return ContractCheck(kept=not offending, metadata={"offending": offending})


class OnlyImportedBy(_DirectImports):
    """Modules, of this package or of another, that only the listed importers may import.

    Options
    -------
    modules
        The modules the contract is about, with all they contain. They may import each other.
    importers
        Who may import them, with all they contain.
    """

    type_name = "only_imported_by"

    modules = fields.ListField(subfield=fields.StringField())
    importers = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Collect every direct import by a module that is not listed."""
        del verbose
        modules = _names(self.modules)
        importers = _names(self.importers)
        offending = [
            _offending(graph, importer, imported)
            for imported in sorted(graph.modules)
            if _within(imported, modules)
            for importer in sorted(graph.find_modules_that_directly_import(imported))
            if not _within(importer, modules + importers)
        ]
        return ContractCheck(kept=not offending, metadata={"offending": offending})
