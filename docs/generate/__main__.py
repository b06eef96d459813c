"""Writes every page."""

from docs.generate import DOCS, names, rendered

if __name__ == "__main__":
    for name in names():
        (DOCS / f"{name}.md").write_text(rendered(name), encoding="utf-8")
