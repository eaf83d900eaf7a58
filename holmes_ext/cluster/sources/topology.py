"""Slurm's topology: which nodes are under which switches or in which blocks, in three notations.

    scontrol show topology     SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[01-16]
                               SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[01-32] Switches=leaf[1-2]
                               BlockName=b1 BlockIndex=0 Nodes=gpu[01-18] BlockSize=18
    topology.conf              the same without levels; of an upper switch only Switches
    topology.yaml              a list of topologies, each a tree or blocks (Slurm 25.05 and newer)

Two nodes are connected where some switch is above both, and in blocks, whose nodes are all on one network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.errors import HolmesError

_KEY = re.compile(r"(?:^|\s)(\w+)=", re.ASCII)
#: The name of the fabric of all blocks, which Slurm does not name.
BLOCKS = "blocks"


@dataclass(frozen=True)
class Unit:
    """A switch with its nodes (a leaf) or its switches, or a block."""

    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...] = ()
    block: bool = False


@dataclass(frozen=True)
class Topology:
    """units: switches and blocks. HolmesError for a node under two of them, or switches in a circle."""

    units: tuple[Unit, ...]
    source: str

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for unit in self.units:
            for node in unit.nodes:
                if node in owner:
                    twice = owner[node] == unit.name
                    where = (
                        f"{unit.name!r} twice" if twice else f"{owner[node]!r} and {unit.name!r}"
                    )
                    raise HolmesError(
                        f"{self.source}: node {node!r} is in {where}; a node is under one "
                        "switch or in one block"
                    )
                owner[node] = unit.name
        above: dict[str, str] = {}
        for unit in self.units:
            for switch in unit.switches:
                above.setdefault(switch, unit.name)
        for name in above:
            seen = {name}
            while (name := above.get(name, "")) and name not in seen:
                seen.add(name)
            if name:
                raise HolmesError(f"{self.source}: switch {name!r} is above itself")

    @cached_property
    def fabric_of(self) -> dict[str, str]:
        """Node -> the uppermost switch above it; BLOCKS in a block."""
        groups: dict[str, str] = {
            unit.name: unit.name for unit in self.units
        }  # union of what is connected

        def root(name: str) -> str:
            while groups.setdefault(name, name) != name:
                name = groups[name]
            return name

        for unit in self.units:
            for switch in unit.switches:
                groups[root(switch)] = root(unit.name)
        return {
            node: BLOCKS if unit.block else root(unit.name)
            for unit in self.units
            for node in unit.nodes
        }


def parse_topology(text: str, source: str) -> Topology:
    """Of topology.conf, `scontrol show topology`, topology.yaml (by its name); HolmesError: the line."""
    if source.endswith((".yaml", ".yml")):
        return Topology(tuple(_units_of_yaml(text, source)), source)
    units: dict[str, Unit] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for keys in _records(line.partition("#")[0]):
            unit = _unit(keys, f"{source}: line {number}")
            if unit is not None and units.setdefault(unit.name, unit) != unit:
                raise HolmesError(
                    f"{source}: line {number}: {unit.name!r} is given twice, with other nodes"
                )
    return Topology(tuple(units.values()), source)


def _records(line: str) -> Iterator[dict[str, str]]:
    """The keys of each switch or block on a line, in lower case."""
    keys: dict[str, str] = {}
    places = list(_KEY.finditer(line))
    for match, following in zip(places, [*places[1:], None]):
        key, value = (
            match[1].lower(),
            line[match.end() : following.start() if following else None].strip(),
        )
        if key in ("switchname", "blockname") and keys:
            yield keys
            keys = {}
        keys[key] = value
    if keys:
        yield keys


def _unit(keys: Mapping[str, str], where: str) -> Unit | None:
    """None for a line that describes none (BlockSizes=...)."""
    block = "blockname" in keys
    name = keys.get("blockname") or keys.get("switchname")
    if not name:
        return None
    switches = tuple(expand(keys.get("switches", ""), where))
    # upper ones repeat what is below them
    nodes = () if switches else tuple(expand(keys.get("nodes", ""), where))
    return Unit(name, nodes, switches, block)


def _units_of_yaml(text: str, source: str) -> Iterator[Unit]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise HolmesError(
            f"{source}: reading it needs PyYAML, which is not installed: pip install pyyaml"
        ) from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise HolmesError(f"{source}: not valid YAML: {str(error)[:200]}") from None
    topologies = (
        [entry for entry in document if isinstance(entry, dict)]
        if isinstance(document, list)
        else []
    )
    if not topologies:
        raise HolmesError(f"{source}: not Slurm's topology.yaml, which is a list of topologies")
    chosen = next(
        (entry for entry in topologies if entry.get("cluster_default") is True), topologies[0]
    )
    where = f"{source}: topology {chosen.get('topology')!r}"
    for entry in _list(chosen, "tree", "switches", where):
        switches = tuple(expand(str(entry.get("children") or ""), where))
        nodes = () if switches else tuple(expand(str(entry.get("nodes") or ""), where))
        yield Unit(str(entry.get("switch")), nodes, switches)
    for entry in _list(chosen, "block", "blocks", where):
        yield Unit(
            str(entry.get("block")), tuple(expand(str(entry.get("nodes") or ""), where)), block=True
        )


def _list(topology: Mapping[str, Any], kind: str, key: str, where: str) -> Sequence[dict[str, Any]]:
    inside = topology.get(kind) or {}
    entries = inside.get(key) if isinstance(inside, dict) else None
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise HolmesError(f"{where}: {kind}.{key} is not a list of them")
    return entries
