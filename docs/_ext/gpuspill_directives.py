"""Directives of these pages: what is made from the code, drawings, and examples."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gpuspill_drawings
import gpuspill_reference
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

EXAMPLES = Path(__file__).parents[2] / "examples"


class Generated(SphinxDirective):
    """Markdown that a function returns, in the place of the directive."""

    has_content = False
    render: ClassVar[Callable[[], str]]

    def run(self) -> list[nodes.Node]:
        """Parse it where it stands."""
        return _parsed(self, type(self).render())


def _parsed(directive: SphinxDirective, text: str) -> list[nodes.Node]:
    container = nodes.Element()
    lines = StringList(text.splitlines(), source=directive.get_source_info()[0])
    directive.state.nested_parse(lines, directive.content_offset, container, match_titles=True)
    return container.children


class Drawing(SphinxDirective):
    """A drawing of :mod:`gpuspill_drawings`, by its name; the content is the caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Put the drawing into the page itself, so that it has the page's colours."""
        drawing = gpuspill_drawings.DRAWINGS[self.arguments[0]]()
        figure = nodes.figure(classes=["gpuspill-drawing"])
        figure += nodes.raw("", drawing, format="html")
        caption = nodes.caption()
        inline, messages = self.state.inline_text(" ".join(self.content), self.lineno)
        caption += inline
        figure += caption
        return [figure, *messages]


class Example(SphinxDirective):
    """A script of the folder ``examples``: its docstring as text, then its code."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"language": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Show the file."""
        path = EXAMPLES / self.arguments[0]
        self.env.note_dependency(str(path))
        source = path.read_text(encoding="utf-8")
        result: list[nodes.Node] = []
        language = self.options.get("language", "python")
        if language == "python":
            tree = ast.parse(source)
            text = ast.get_docstring(tree)
            if text is not None:
                result += _parsed(self, text)
                source = "\n".join(source.splitlines()[tree.body[0].end_lineno or 0 :]).strip("\n") + "\n"
        block = nodes.literal_block(source, source, language=language)
        name = nodes.container("", literal_block=True, classes=["literal-block-wrapper"])
        name += nodes.caption("", "", nodes.literal("", f"examples/{self.arguments[0]}"))
        name += block
        return [*result, name]


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx."""
    for name in ("options", "statistics", "commands", "labels", "metrics"):
        render = staticmethod(getattr(gpuspill_reference, f"render_{name}"))
        app.add_directive(f"gpuspill-{name}", type(name.title(), (Generated,), {"render": render}))
    app.add_directive("drawing", Drawing)
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "version": app.config.version}
