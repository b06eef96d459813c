"""The documentation as a site: `make site` builds it into build/site, without the network.

Owns what belongs to it: the Markdown files that the repository has anyway, a page of the Python API, and an index.html
that leads to docs/README.md. The menu is made of the headings and links of the two indexes, so no second list of pages
is kept. A link or anchor that leads nowhere fails the build. Sphinx reads it.
"""

import re
from typing import Final

from sphinx.application import Sphinx

from smq import __version__

project = "smq"
author = "The smq authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "docs/reference/*.md",
    "docs/site/*.md",
    "deploy/*.md",
    "deploy/**/*.md",
    "examples/*.md",
]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # the site's root, which leads to root_doc
html_title = f"smq {release}"
html_copy_source = False
html_show_copyright = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"

_INDEXES: Final = ("docs/README", "docs/decisions/README")


def menu(index: str) -> str:
    """A hidden toctree per heading of an index, of the pages that are linked under it, in that order."""
    trees = []
    for part in index.split("\n## ")[1:]:
        pages = re.findall(r"\]\(([^)#:]+)\.md\)", part)
        caption = part.partition("\n")[0]
        trees.append("\n".join((":::{toctree}", ":hidden:", f":caption: {caption}", *dict.fromkeys(pages), ":::", "")))
    return "\n" + "\n".join(trees)


def _add_menu(_app: Sphinx, page: str, source: list[str]) -> None:
    if page in _INDEXES:
        source[0] += menu(source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_menu)
