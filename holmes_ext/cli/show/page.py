"""The HTML page that `holmes demo` and `holmes report` write: tables, and pictures inside the file; nothing from the
network, light or dark as the reader's browser is, tables scroll on a narrow screen."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>:root{{color-scheme:light dark}}body{{font:15px sans-serif;max-width:1150px;margin:2em auto;padding:0 1em}}
img{{max-width:100%;background:#fff}}h1{{font-size:1.3em;overflow-wrap:anywhere}}.table{{overflow-x:auto}}
table{{border-collapse:collapse;margin:1em 0}}td,th{{padding:.3em .8em;border-bottom:1px solid #8888;text-align:right;
white-space:nowrap}}td:first-child,th:first-child{{text-align:left}}</style>
"""


def page(title: str, *parts: str) -> str:
    """The document; the parts are HTML."""
    return _HEAD.format(title=html.escape(title)) + "\n".join([*parts, ""])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts as a table."""
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return f"<div class=table><table>{''.join(lines)}</table></div>"


def _line(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
