"""[link.FABRIC] of cluster.toml: what `holmes probe` measured, and writing it there without touching the rest of the file.

    [link.ethernet]
    send = [[1024, 0.00021], [65536, 0.0024]]      # bytes of a message, seconds from node to node
    ring = [[8192, 0.0004], [524288, 0.0171]]      # bytes that a rank passes on in one step of an all-reduce's ring, seconds of the step

Both optional, at least two sizes each, both numbers growing. Left out: rate and latency say what a message takes (plan/cost/links.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

Points = tuple[tuple[float, float], ...]
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
NOTE = "# measured by `holmes probe`; it replaces these tables, and only these"


@dataclass(frozen=True)
class MeasuredLink:
    """(bytes, seconds) of messages and of ring steps; () where not measured."""

    send: Points = ()
    ring: Points = ()


def parse_links(table: Table, fabrics: set[str]) -> dict[str, MeasuredLink]:
    """The tables by fabric name; HolmesError names the key."""
    found = {}
    for name in list(table.values):
        own = table.table(name)
        if name not in fabrics:
            raise HolmesError(f"{table.source}: key 'link.{name}': there is no fabric of that name; known: {', '.join(sorted(fabrics))}")
        found[name] = MeasuredLink(_points(own, "send"), _points(own, "ring"))
        own.done()
    return found


def _points(table: Table, key: str) -> Points:
    rows = table.list(key, list, ())
    points: list[tuple[float, float]] = []
    for index, row in enumerate(rows):
        if len(row) != 2 or not all(isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e18 for value in row):
            raise HolmesError(f"{table.at(key)}: item {index} is {row!r:.60}, not [bytes, seconds], both above 0")
        if points and not (points[-1][0] < row[0] and points[-1][1] <= row[1]):
            raise HolmesError(f"{table.at(key)}: item {index}, {row!r:.60}, after {list(points[-1])}: bytes must grow and seconds not shrink")
        points.append((float(row[0]), float(row[1])))
    if len(points) == 1:
        raise HolmesError(f"{table.at(key)}: one size makes no curve; give two or more")
    return tuple(points)


def render(links: Mapping[str, MeasuredLink]) -> str:
    """As TOML."""
    parts = [NOTE]
    for name, link in links.items():
        parts.append(f"[link.{name if re.fullmatch('[A-Za-z0-9_-]+', name) else _quoted(name)}]")
        for key in ("send", "ring"):
            if points := getattr(link, key):
                parts.append(f"{key} = [" + ", ".join(f"[{size:.0f}, {seconds:.4g}]" for size, seconds in points) + "]")
    return "\n".join(parts) + "\n"


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def merge(text: str, links: Mapping[str, MeasuredLink], source: str) -> str:
    """`text` of a cluster.toml with its [link] tables replaced; the rest stays byte for byte. HolmesError when that cannot be done."""
    before = tomllib.loads(text)
    kept, dropping = [], False
    for line in text.splitlines(keepends=True):
        if header := _HEADER.fullmatch(line.rstrip("\r\n")):
            dropping = re.split(r"[.\s]", header[1])[0].strip("\"'") == "link"
        if not dropping and line.strip() != NOTE:
            kept.append(line)
    rest = "".join(kept)
    merged = rest.rstrip("\r\n") + "\n\n" + render(links)
    try:
        after = tomllib.loads(merged)
    except ValueError:
        after = {}
    before.pop("link", None)
    if after.pop("link", None) is None or after != before:
        raise HolmesError(f"{source}: its [link] tables cannot be replaced safely; put them in tables of their own at the end, or use --dry-run")
    return merged


def store(path: str | Path, links: Mapping[str, MeasuredLink]) -> None:
    """Put the measured links into the cluster.toml `path`: a new file takes its place in one step, with its permissions."""
    real = Path(os.path.realpath(path))
    try:
        merged = merge(real.read_text(encoding="utf-8"), links, str(path))
        handle, name = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(merged)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, stat.S_IMODE(real.stat().st_mode))
            os.replace(name, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, UnicodeDecodeError) as error:
        raise HolmesError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}); use --dry-run to print the tables") from None
