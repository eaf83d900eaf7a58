"""The HTML page that `holmes demo`, `plan` and `report` write: tables, and pictures as SVG inside the file.

Nothing comes from the network, nothing is run. Light or dark as the browser is; on a narrow screen tables and
pictures scroll, and a shade at their stage link says so.
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
.scroll svg{{display:block}}table{{border-collapse:collapse}}
td,th{{padding:.3em .8em;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}}
td.text,th.text,td:first-child,th:first-child{{text-align:left}}tr.strong td{{font-weight:bold}}
pre{{background:var(--shade);padding:.6em;margin:.3em 0;user-select:all;white-space:pre-wrap;
overflow-wrap:anywhere}}
pre span{{display:inline-block;max-width:100%}}
</style></head><body>
"""


def page(title: str, *parts: str) -> str:
    """The document; the parts are HTML."""
    return _HEAD.format(title=html.escape(title)) + "\n".join([*parts, "</body></html>\n"])


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraphs(lines: Iterable[str]) -> str:
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], strong: int | None = None) -> str:
    """Texts as a table, numbers flush right; strong: the number of a row in bold, -1 the last."""
    texts = list(rows)
    words = [not any(re.match(r"[-~]?\d", cell) for cell in column) for column in zip(*texts)]
    bold = None if strong is None else strong % len(texts)
    lines = [
        _line("th", head, words),
        *(_line("td", row, words, number == bold) for number, row in enumerate(texts)),
    ]
    return _scroll(f"<table>{''.join(lines)}</table>", "table")


def _line(kind: str, cells: Sequence[str], words: Sequence[bool], bold: bool = False) -> str:
    row = "<tr class=strong>" if bold else "<tr>"
    tags = [f"{kind} class=text" if word else kind for word in words or [False] * len(cells)]
    return (
        row
        + "".join(f"<{tag}>{html.escape(cell)}</{kind}>" for tag, cell in zip(tags, cells))
        + "</tr>"
    )


def command(text: str) -> str:
    """What is to be copied: one click marks all of it. No line ends within a flag."""
    return "<pre>" + re.sub(r"--\S+", r"<span>\g<0></span>", html.escape(text)) + "</pre>"


def picture(svg: str, alt: str) -> str:
    """An <svg> element (pictures.svg) in its own size."""
    return _scroll(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1), alt)


def _scroll(content: str, label: str) -> str:
    """Reached by the keyboard too."""
    return f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(label)}">{content}</div>'
