"""Print the table of kinds of values in docs/compatibility.md: what comes back after spilling, with stock beside it.

    .venv/bin/python ci/kinds_table.py            # the kinds that every environment of the tests can make
    .venv/bin/python ci/kinds_table.py --write    # put the table into docs/compatibility.md

Rows of libraries that are not installed are taken from the page as they are. Stock is what distributed's
``SpillBuffer`` does: the value is serialised to bytes when it is evicted, and made from them when it is read.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.protocol.serialize import deserialize_bytes, serialize_bytelist

from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.storage.base import in_memory
from gpuspill.testing.kinds import CORE, MORE, Make
from gpuspill.testing.same import difference

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- kinds of values: written by ci/kinds_table.py -->", "<!-- end of kinds of values -->"
HEAD = [
    f"Stock is distributed {importlib.metadata.version('distributed')}.",
    "",
    "| library | kind of value | gpuspill | stock |",
    "|---|---|---|---|",
]
SAME = "the same"


def by_gpuspill(value: object) -> Any:
    """Return a value as it comes back from disk."""
    serializer = DaskSerializer()
    header, frames = serializer.dumps(value)
    return serializer.loads(header, [memoryview(bytearray(in_memory(frame))) for frame in frames])


def by_stock(value: object) -> Any:
    """Return a value as it comes back from distributed's own buffer."""
    return deserialize_bytes(b"".join(map(bytes, serialize_bytelist(value, on_error="raise"))))


def outcome(make: Make, way: Callable[[object], Any]) -> str:
    """Return what becomes of a kind of value: that it is the same, or in what it differs, or why it cannot go."""
    try:
        value = way(make())
    except Exception as error:
        return f"nothing: `{type(error).__name__}`"
    found = difference(value, make())
    return SAME if found is None else re.sub(r"(keys of )?value(\[0\])? is a ([\w.]*), not a .*", r"\1a `\3`", found)


def installed() -> dict[str, Mapping[str, Make]]:
    """Return the kinds that can be made here, by library."""
    found = dict(CORE)
    for library, kinds in MORE.items():
        try:
            importlib.import_module(library)
        except ImportError:
            continue
        found[library] = kinds()
    return found


def rows(library: str, kinds: Mapping[str, Make]) -> list[str]:
    """Return the rows of one library: those that are the same everywhere in one, each other in its own."""
    outcomes = {name: (outcome(make, by_gpuspill), outcome(make, by_stock)) for name, make in kinds.items()}
    same = [name for name, found in outcomes.items() if found == (SAME, SAME)]
    made = [f"| {library} | {'; '.join(same)} | {SAME} | {SAME} |"]
    made += [
        f"| {library} | {name} | {ours} | {stock} |" for name, (ours, stock) in outcomes.items() if name not in same
    ]
    return made


def table(page: str) -> str:
    """Return the table; rows of libraries that are not installed as `page` has them."""
    old = page[page.index(BEGIN) : page.index(END)].splitlines() if BEGIN in page else []
    here = installed()
    lines = list(HEAD)
    for library in (*CORE, *MORE):
        known = here.get(library)
        lines += [line for line in old if line.startswith(f"| {library} |")] if known is None else rows(library, known)
    return "\n".join([BEGIN, *lines, ""])


def replaced(page: str) -> str:
    """Return the page with the table as it is now."""
    return page[: page.index(BEGIN)] + table(page) + page[page.index(END) :]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    text = PAGE.read_text()
    if "--write" in sys.argv:
        PAGE.write_text(replaced(text))
    else:
        print(table(text))
