"""Shortens SVG files that matplotlib writes."""

from __future__ import annotations

import re


def shortened(text: str) -> str:
    """Return an SVG of matplotlib shortened: one decimal in tags, short rectangles, fewer paths.

    The patterns fit the text that matplotlib writes: a rectangle is a path of four lines, with a
    line break after each. A path drawn in another way stays as it is. Opacities keep their decimals:
    with one, 0.08 would be 0, and nothing drawn.
    """
    decimals = re.compile(r"(?<!opacity: \d)(\.\d)\d+")
    text = re.sub(r"<[^>]+>", lambda tag: decimals.sub(r"\1", tag[0]), text)
    # A rectangle: M x y, L x y2, L x2 y2, L x2 y, z. \1 and \3 are the coordinates that recur. Its
    # lines become vertical and horizontal lines (V, H) with a single coordinate each.
    text = re.sub(
        r'd="M (\S+) (\S+) \nL \1 (\S+) \nL (\S+) \3 \nL \4 \2 \nz\n"',
        r'd="M\1 \2V\3H\4V\2z"',
        text,
    )

    # Paths that follow each other with the same clip path and style (\1) become a single path.
    equal_paths = r'<path d="[^"]*" (clip-path="[^"]*" style="[^"]*")/>(?:\s*<path d="[^"]*" \1/>)+'

    def joined(paths: re.Match[str]) -> str:
        """Return a single path that draws what the matched paths draw."""
        drawing_commands = "".join(re.findall(r'd="([^"]*)"', paths[0]))
        return f'<path d="{drawing_commands}" {paths[1]}/>'

    return re.sub(r"\n\s*", "\n", re.sub(equal_paths, joined, text))
