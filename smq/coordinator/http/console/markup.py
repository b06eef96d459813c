"""HTML made of values: everything that is not markup already is escaped, and nothing a user wrote can become markup.

Owns escaping, the frame of a page and its style. A page has no script, and its policy forbids any: names and records
come from strangers. All pages of the console import it.
"""

import asyncio
import html
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias
from urllib.parse import quote, urlencode

# What a browser may do with a page: load our own style, and send forms back here. No scripts, frames or images at all.
POLICY: Final = (
    "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "img-src 'none'; script-src 'none'"
)
# Control characters are shown as their pictures, so that a value can neither hide nor reorder text. Line ends and tabs
# stay. So are the characters that change the direction of text.
_PICTURES: Final = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_DIRECTIONS: Final = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F), 0xFFFD)
# All in one table, and so in one pass over the text: a page has thousands of cells.
_ESCAPES: Final = {ord(c): html.escape(c, quote=True) for c in "&<>\"'"}
_SHOWN: Final = _PICTURES | _DIRECTIONS | _ESCAPES


ROWS_PER_TURN: Final = 25  # of a table with ten columns: a millisecond


class Markup(str):
    """Text that is HTML already. Only this module makes it of values."""

    __slots__ = ()


Content: TypeAlias = "Markup | str | int | None"


def text(value: Content) -> Markup:
    """The value as it may stand between tags and in attributes; a dash for None."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup("-")
    return Markup(f"{value:,}" if isinstance(value, int) else value.translate(_SHOWN))


def tag(name: str, /, *content: Content, **attributes: str | int | bool) -> Markup:
    """An element. An attribute's underscores are hyphens, a trailing one is dropped; True stands for itself."""
    written = ""
    for key, value in attributes.items():
        if value is not False:
            written += f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(str(value))}"')
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def void(name: str, /, **attributes: str | int | bool) -> Markup:
    """An element that has no content and no end, such as an input."""
    return Markup(tag(name, **attributes).removesuffix(f"</{name}>"))


def joined(parts: Iterable[Content]) -> Markup:
    return Markup("".join(map(text, parts)))


def link(title: Content, *path: str, **query: str | int) -> Markup:
    """To a page of the console. Each part of the path is escaped as such."""
    return tag("a", title, href=address(*path, **query))


def address(*path: str, **query: str | int) -> str:
    target = "/console/" + "/".join(quote(part, safe="") for part in path)
    return target + ("?" + urlencode(query) if query else "")


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Content]]) -> Markup:
    """A caption and column heads say to a screen reader what a cell is."""
    return _framed(caption, heads, [row(values) for values in rows])


async def long_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Content]]) -> Markup:
    """A table whose rows are made bit by bit, so that other tasks run in between."""
    body: list[Markup] = []
    for values in rows:
        body.append(row(values))
        if len(body) % ROWS_PER_TURN == 0:
            await asyncio.sleep(0)
    return _framed(caption, heads, body)


def _framed(caption: str, heads: Sequence[str], body: Sequence[Markup]) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    if not body:
        return tag("p", f"{caption}: none.", class_="none")
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", inner, class_="wide", tabindex="0", role="region", aria_label=caption)


def open_table(caption: str, heads: Sequence[str]) -> tuple[Markup, Markup]:
    """The parts before and after the rows of a table that grows while the browser shows it."""
    written = table(caption, heads, [("",)])
    before, _, after = written.partition(row([""]))
    return Markup(before), Markup(after)


def row(values: Sequence[Content]) -> Markup:
    return tag("tr", *(_cell(value) for value in values))


def _cell(value: Content) -> Markup:
    return tag("td", value, class_="number") if isinstance(value, int) else tag("td", value)


def facts(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """Names with their values."""
    return tag("dl", *(joined((tag("dt", name), tag("dd", value))) for name, value in pairs))


_PAGES: Final = (
    ("Cluster", ""),
    ("Topics", "topics"),
    ("Groups", "groups"),
    ("Transactions", "transactions"),
    ("Settings", "settings"),
    ("Events", "events"),
)


_PLACE: Final = Markup("<!-- content -->")  # no text from elsewhere can be it: that is escaped


def page(title: str, here: str, *content: Content, note: str, refresh_s: int = 0) -> bytes:
    """The whole page. `note` says as of when; `here` is the section. With `refresh_s` the browser loads it again."""
    before, after = frame(title, here, note=note, refresh_s=refresh_s)
    return before + joined(content).encode() + after


def frame(title: str, here: str, *, note: str, refresh_s: int = 0) -> tuple[bytes, bytes]:
    """The parts before and after the content of a page."""
    items = [
        tag("li", tag("a", name, href=address(path), aria_current="page" if path == here else False))
        for name, path in _PAGES
    ]
    head = joined(
        (
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup(f'<meta http-equiv="refresh" content="{int(refresh_s)}">') if refresh_s else Markup(""),
            tag("title", f"{title} · smq"),
            Markup('<link rel="stylesheet" href="/console/style.css">'),
        )
    )
    body = joined(
        (
            tag("a", "Skip to the content", href="#content", class_="skip"),
            tag("header", tag("nav", tag("ul", *items), aria_label="Console")),
            tag("main", tag("h1", title), _PLACE, id="content"),
            tag("footer", tag("p", note)),
        )
    )
    whole = f'<!doctype html><html lang="en">{tag("head", head)}{tag("body", body)}</html>'
    before, _, after = whole.partition(_PLACE)
    return before.encode(), after.encode()


STYLE: Final = """\
:root { color-scheme: light dark; --fg: #1b1f24; --bg: #ffffff; --line: #d0d7de; --soft: #f6f8fa; --link: #0550ae;
  --bad: #a40e26; --warn: #7a4d00; --good: #116329; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6edf3; --bg: #0d1117; --line: #3d444d; --soft: #161b22;
  --link: #79b8ff; --bad: #ff9492; --warn: #e3b341; --good: #7ee787; } }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); }
header, main, footer { padding: 0 1.5rem; max-width: 90rem; margin: 0 auto; }
header { border-bottom: 1px solid var(--line); }
nav ul { display: flex; flex-wrap: wrap; gap: 1.5rem; list-style: none; padding: .8rem 0; margin: 0; }
a { color: var(--link); }
a[aria-current] { font-weight: 700; text-decoration: none; color: var(--fg); }
a:focus-visible, input:focus-visible, select:focus-visible, button:focus-visible, .wide:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999px; }
.skip:focus { left: 1rem; top: .5rem; background: var(--bg); padding: .5rem; }
.wide { overflow-x: auto; margin: 1rem 0 2rem; }
table { border-collapse: collapse; width: 100%; }
caption { text-align: left; font-weight: 700; padding: .4rem 0; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; }
td dl { margin: 0; }
figure { margin: 1rem 0 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { color: inherit; opacity: .75; }
dd { margin: 0; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
@media (max-width: 60rem) { td pre { width: max-content; max-width: 16rem; } }
@media (max-width: 40rem) { body { font-size: 13px; } header, main, footer { padding: 0 .8rem; }
  nav ul { gap: .4rem 1rem; } th, td { padding-right: .5rem; }
  table:not(:has(pre)) td:not(:last-child) { overflow-wrap: anywhere; } }
form { display: flex; flex-wrap: wrap; gap: .8rem; align-items: end; background: var(--soft); padding: 1rem;
  border: 1px solid var(--line); border-radius: 6px; }
label { display: grid; gap: .2rem; font-size: 13px; }
input, select, button { font: inherit; padding: .3rem .5rem; color: inherit; background: var(--bg);
  border: 1px solid var(--line); border-radius: 4px; }
button.danger { border-color: var(--bad); color: var(--bad); font-weight: 700; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; } form { margin: 0 0 1rem; } .hint { margin: 0; font-size: 13px; }
.bad { color: var(--bad); font-weight: 700; } .warn { color: var(--warn); font-weight: 700; }
.good { color: var(--good); }
svg { width: 100%; max-width: 50rem; height: 10rem; background: var(--soft); border: 1px solid var(--line); }
polyline { fill: none; stroke: var(--link); stroke-width: 2; vector-effect: non-scaling-stroke; }
footer { font-size: 13px; opacity: .8; padding-bottom: 2rem; }
"""
