"""Writes the rates and latencies that `holmes probe` measures into a cluster.toml.

The values are in the tables [link.FABRIC] and [[measured]], whose format wan.py describes. Tables
of an earlier measurement are replaced, and the rest of the file stays byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_ext.cluster.wan import MeasuredLink, MeasuredPair, Points
from holmes_ext.document import parse_toml, quoted, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.files import write_whole
from holmes_ext.words import why

#: TOML header of a table or of an item of a list of tables.
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
#: Top-level keys of the tables that `holmes probe` writes.
_MEASURED_KEYS = ("link", "measured")
NOTE = "# measured by `holmes probe`; it replaces these tables, and only these"


def measured_tables(links: Mapping[str, MeasuredLink], pairs: Sequence[MeasuredPair] = ()) -> str:
    """Return measured values as tables of a cluster.toml.

    Args:
        links: Fabric name -> measured times.
        pairs: Measured links between clusters.
    """
    lines = [NOTE]
    for name, link in links.items():
        # TOML needs quotes around a key with other characters than these.
        is_bare_key = re.fullmatch("[A-Za-z0-9_-]+", name) is not None
        lines.append(f"[link.{name if is_bare_key else quoted(name)}]")
        if link.send:
            lines.append(f"send = [{_list_of_points(link.send)}]")
        if link.ring:
            lines.append(f"ring = [{_list_of_points(link.ring)}]")
    for pair in pairs:
        first, second = pair.clusters
        lines.append("[[measured]]")
        lines.append(f'clusters = ["{first}", "{second}"]')
        lines.append(f'rate = "{pair.rate_bps / 1e6:.6g}Mb/s"')
        if pair.stream_bps:
            lines.append(f'stream = "{pair.stream_bps / 1e6:.6g}Mb/s"')
        lines.append(f'latency = "{pair.latency_s * 1e3:.4g}ms"')
    return "\n".join(lines) + "\n"


def _list_of_points(points: Points) -> str:
    return ", ".join(f"[{size_bytes:.0f}, {seconds:.4g}]" for size_bytes, seconds in points)


def with_measured_values(
    text: str, links: Mapping[str, MeasuredLink], source: str, pairs: Sequence[MeasuredPair] = ()
) -> str:
    """Return a cluster.toml with new measured values in place of the old ones.

    Everything outside the [link] and [[measured]] tables stays byte for byte.

    Args:
        text: Content of the file.
        links: Fabric name -> measured times.
        source: Name of the file, for the error message.
        pairs: Measured links between clusters.

    Raises:
        HolmesError: the old tables are written in a way that cannot be replaced safely.
    """
    merged = _without_measured_tables(text).rstrip("\r\n") + "\n\n" + measured_tables(links, pairs)
    before = parse_toml(text, source).values
    try:
        after = parse_toml(merged, source).values
    except HolmesError:
        after = {}  # without measured values, so the error below is raised
    # Removing lines may have damaged the file: compare both versions without the measured values.
    has_measured_values = any(after.get(key) for key in _MEASURED_KEYS)
    for key in _MEASURED_KEYS:
        before.pop(key, None)
        after.pop(key, None)
    if not has_measured_values or after != before:
        advice = "put them in tables of their own at the end, or use --dry-run"
        raise HolmesError(
            f"{source}: its [link] and [[measured]] tables cannot be replaced safely; {advice}"
        )
    return merged


def _without_measured_tables(text: str) -> str:
    """Return a cluster.toml without the lines of its [link] and [[measured]] tables."""
    kept = []
    is_measured_table = False  # whether the current line belongs to such a table
    for line in text.splitlines(keepends=True):
        header = _HEADER.fullmatch(line.rstrip("\r\n"))
        if header:
            # The header of [link.ethernet] or [link."a b"] gives "link".
            top_level_key = re.split(r"[.\s]", header[1])[0].strip("\"'")
            is_measured_table = top_level_key in _MEASURED_KEYS
        if not is_measured_table and line.strip() != NOTE:
            kept.append(line)
    return "".join(kept)


def write_measured_values(
    path: str | Path, links: Mapping[str, MeasuredLink], pairs: Sequence[MeasuredPair] = ()
) -> None:
    """Write measured values into a cluster.toml. The file keeps its permissions.

    Args:
        path: The cluster.toml.
        links: Fabric name -> measured times.
        pairs: Measured links between clusters.

    Raises:
        HolmesError: the file cannot be read or written, or its tables cannot be replaced safely.
    """
    text = read_text(path, advice="name a cluster.toml")
    merged = with_measured_values(text, links, str(path), pairs)
    try:
        write_whole(path, merged)
    except OSError as error:
        raise HolmesError(
            f"{path}: cannot be written ({why(error)}); use --dry-run to print the tables"
        ) from None
