"""Parts of the HTML pages that `holmes demo`, `plan` and `report` write: tables, and pictures as inline SVG.

A page loads nothing from the network and runs no script. It follows the browser's light or dark
mode. On a narrow screen tables and pictures scroll, with a shade at the edge where there is more.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">
<style>:root{{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--line:#d0d7de;--shade:#f6f8fa;--edge:#8886}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e6e6e6;--paper:#16181d;--line:#3d444d;--shade:#22252b}}}}
body{{font:15px/1.5 sans-serif;color:var(--ink);background:var(--paper);max-width:1120px;margin:1.5em auto;
padding:0 1em}}h1{{font-size:1.3em}}h2{{font-size:1.1em;border-bottom:1px solid var(--line);margin-top:2em}}
h1,p,h3{{overflow-wrap:anywhere}}h3{{font-size:1em;margin:1em 0 .3em}}.scroll{{overflow-x:auto;margin:1em 0;
background:linear-gradient(90deg,var(--paper) 50%,transparent) 0 0/2em 100% no-repeat local,
linear-gradient(270deg,var(--paper) 50%,transparent) 100% 0/2em 100% no-repeat local,
linear-gradient(90deg,var(--edge),transparent) 0 0/.7em 100% no-repeat,
linear-gradient(270deg,var(--edge),transparent) 100% 0/.7em 100% no-repeat}}
.scroll svg{{display:block}}.narrow{{display:none}}
@media(max-width:960px){{.wide{{display:none}}.narrow{{display:block}}}}table{{border-collapse:collapse}}
td,th{{padding:.3em .8em;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}}
td.text,th.text,td:first-child,th:first-child{{text-align:left}}
td.long,th.long{{white-space:normal;min-width:9em}}
@media(max-width:600px){{td,th{{padding:.3em .45em}}th{{white-space:normal}}}}tr.strong td{{font-weight:bold}}
pre{{background:var(--shade);padding:.6em;margin:.3em 0;user-select:all;white-space:pre-wrap;
overflow-wrap:anywhere}}
pre span{{display:inline-block;max-width:100%;word-break:break-all}}
</style></head><body>
"""

#: Most characters of a cell without line breaks.
_LONG = 20


def page(title: str, *parts: str) -> str:
    """Return the whole HTML document.

    Args:
        title: Plain text.
        parts: HTML of the body.
    """
    return _HEAD.format(title=html.escape(title)) + "\n".join([*parts, "</body></html>\n"])


def heading(text: str, level: int = 2) -> str:
    """Return an HTML heading (h1 to h6) with a plain text."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraphs(lines: Iterable[str]) -> str:
    """Return an HTML paragraph for each line of plain text."""
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], strong: int | None = None) -> str:
    """Return an HTML table of plain texts; columns with a number are flush right.

    Columns of long texts have line breaks if the table is wider than the page.

    Args:
        head: Names of the columns.
        rows: Texts of each row.
        strong: Index of a row in bold, -1 for the last.
    """
    texts = list(rows)
    classes = [_column_class(column) for column in zip(*texts)] or [""] * len(head)
    bold_row = None if strong is None else strong % len(texts)
    lines = [_row("th", head, classes)]
    for number, cells in enumerate(texts):
        lines.append(_row("td", cells, classes, is_bold=number == bold_row))
    return _scroll(f"<table>{''.join(lines)}</table>", "table")


def _column_class(column: Sequence[str]) -> str:
    """Return the class attribute of the cells in a table's column; "" for short numbers."""
    names = []
    if not any(re.match(r"[-~]?\d", cell) for cell in column):
        names.append("text")
    if max(map(len, column)) > _LONG:
        names.append("long")
    return f' class="{" ".join(names)}"' if names else ""


def _row(tag: str, cells: Sequence[str], classes: Sequence[str], is_bold: bool = False) -> str:
    """Return a row of an HTML table.

    Args:
        tag: "th" for the head, "td" for other rows.
        cells: Texts of the row.
        classes: Class attribute of each column's cells, as _column_class() returns it.
        is_bold: Whether the row is bold.
    """
    parts = ["<tr class=strong>" if is_bold else "<tr>"]
    for cell, class_attribute in zip(cells, classes):
        # A long list without spaces, such as "every=32,fragments=4", breaks after a comma.
        text = re.sub(r",(?=[^\s\d])", ",<wbr>", html.escape(cell))
        parts.append(f"<{tag}{class_attribute}>{text}</{tag}>")
    parts.append("</tr>")
    return "".join(parts)


def command(text: str) -> str:
    """Return the HTML of a command to copy: a click selects all of it, and no line breaks within a flag."""
    return "<pre>" + re.sub(r"--\S+", r"<span>\g<0></span>", html.escape(text)) + "</pre>"


def picture(svg: str, alt: str) -> str:
    """Return an <svg> element (pictures.svg) in its own size, with a text for screen readers."""
    return _scroll(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1), alt)


def _scroll(content: str, label: str) -> str:
    """Wrap HTML in a region that scrolls on a narrow screen, also by the keyboard."""
    return f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(label)}">{content}</div>'
