"""Writes every page."""

from docs.generate import names, page_of, rendered

if __name__ == "__main__":
    for name in names():
        page_of(name).write_text(rendered(name), encoding="utf-8")
