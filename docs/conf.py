"""The documentation, built by ``make docs``: every warning is an error, and nothing is fetched."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "gpuspill"
author = "The gpuspill developers"
copyright = author
release = version = installed_version("gpuspill")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "gpuspill_directives",
]
exclude_patterns = ["_build", "_ext"]
root_doc = "index"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

# Docstrings are numpydoc. Names in backticks that lead nowhere are an error of Python's own names only.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autosummary_generate = False
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "furo"
html_title = f"gpuspill {release}"
html_static_path = ["_static"]
html_css_files = ["gpuspill.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
smartquotes = False  # "--option" is no dash
pygments_style = "default"
pygments_dark_style = "monokai"
