"""The rules for prose that ``make lint`` checks."""

from __future__ import annotations

from ci.prose import folder, markdown, python, wide


def test_words_and_columns_in_markdown() -> None:
    text = "\n".join(
        [
            "Nobody waits.",
            "a" * 101,
            "```",
            "somebody = 1  " + "a" * 101,
            "```",
            "| " + "a" * 101 + " |",
            "<!-- hidden",
            "somebody",
            "-->",
            "`test_somebody` and [all](the/same.md)",
            "| it works all the same |",
        ]
    )
    assert list(markdown(text)) == [
        (1, "the word 'Nobody'"),
        (2, "101 columns"),
        (11, "the word 'all the same'"),
    ]


def test_words_in_python() -> None:
    assert list(python("x = 1  # whoever\n\n# of which two")) == [(1, "the word 'whoever'"), (3, "the word 'of which'")]
    assert [folder(name) for name in ("gpuspill/cli.py", "gpuspill/core/state.py", "tests/core/x.py")] == [
        "gpuspill",
        "gpuspill/core",
        "tests",
    ]


def test_columns_of_comments_and_docstrings() -> None:
    long = "word " * 25
    text = "\n".join(
        [
            f'"""{long}."""',
            f"x = {long!r}  # and a comment beside code is code's",
            f"# {long}",
            "def f():",
            '    """Do.',
            "",
            f"    {long}",
            f"    name  {long}",
            f"    >>> {long}",
            '    """',
            f"    return {long!r}, (",
            f"        {long!r}",
            "    )",
        ]
    )
    assert [number for number, _ in wide(text)] == [1, 3, 7]
