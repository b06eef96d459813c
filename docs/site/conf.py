"""The documentation as a site: `make site` builds it into build/site, without the network.

Owns what belongs to it: the Markdown files that the repository has anyway, two pages of its own, and an index.html that
leads to the first of them. A link or anchor that leads nowhere fails the build. Sphinx reads it.
"""

from smq import __version__

project = "smq"
author = "The smq authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/site/index"
include_patterns = [
    "*.md",
    "docs/*.md",
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
