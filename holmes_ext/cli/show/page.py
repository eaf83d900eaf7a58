"""The HTML page that `holmes demo` and `holmes report` write: tables, and pictures inside the file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_HEAD = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px sans-serif;max-width:1150px;margin:2em auto}}img{{max-width:100%}}
table{{border-collapse:collapse;margin:1em 0}}
td,th{{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}}td:first-child{{text-align:left}}</style>
"""


def page(title: str, *parts: str) -> str:
    """The document; the parts are HTML."""
    return _HEAD.format(title=html.escape(title)) + "\n".join([*parts, ""])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts as a table."""
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _line(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
