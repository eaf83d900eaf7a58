"""Reader of Slurm's network topology: the nodes under each switch or in each block.

There are three formats:

    scontrol show topology     one line for each switch or block. A leaf switch, a switch above two
                               leaf switches (its line continues with "Switches="), and a block:
                                   SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[01-16]
                                   SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[01-32]
                                       Switches=leaf[1-2]
                                   BlockName=b1 BlockIndex=0 Nodes=gpu[01-18] BlockSize=18
    topology.conf              the same without levels; an upper switch has only Switches
    topology.yaml              a list of topologies, each a tree or blocks (Slurm 25.05 and newer)

Two nodes are on the same fabric if some switch is above both. All nodes in blocks are on one
fabric: a block is a group of nodes with short paths inside of one network (such as an NVLink
domain), and Slurm also gives one job nodes of several blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.errors import HolmesError

#: Key of a KEY=VALUE.
_KEY = re.compile(r"(?:^|\s)(\w+)=", re.ASCII)
#: Name of the fabric of all blocks. Slurm has no name for it.
BLOCKS = "blocks"


@dataclass(frozen=True)
class Unit:
    """Switch or block of the topology."""

    name: str
    nodes: tuple[str, ...]  # of a block or a leaf switch; () for an upper switch
    switches: tuple[str, ...] = ()  # switches below an upper switch
    block: bool = False


@dataclass(frozen=True)
class Topology:
    """Units (switches and blocks) of a network as Slurm describes it, with the nodes of each.

    Raises:
        HolmesError: a node is in two units (leaf switches or blocks), or a switch is above itself.
    """

    units: tuple[Unit, ...]
    source: str  # file or command that describes the topology, for error messages

    def __post_init__(self) -> None:
        self._check_nodes()
        self._check_switches()

    def _check_nodes(self) -> None:
        """Raise HolmesError if a node is in two leaf switches or blocks, or twice in the same."""
        unit_of_node: dict[str, str] = {}
        for unit in self.units:
            for node in unit.nodes:
                first = unit_of_node.get(node)
                if first is None:
                    unit_of_node[node] = unit.name
                    continue
                units = f"{first!r} and {unit.name!r}"
                if first == unit.name:
                    units = f"{first!r} twice"
                raise HolmesError(
                    f"{self.source}: node {node!r} is in {units}; a node is under one "
                    "switch or in one block"
                )

    def _check_switches(self) -> None:
        """Raise HolmesError if a switch is above itself, directly or over other switches."""
        upper_switch: dict[str, str] = {}  # switch -> the switch above it
        for unit in self.units:
            for switch in unit.switches:
                upper_switch.setdefault(switch, unit.name)
        for start in upper_switch:
            visited = {start}
            switch = upper_switch[start]
            while switch in upper_switch and switch not in visited:
                visited.add(switch)
                switch = upper_switch[switch]
            if switch in visited:
                raise HolmesError(f"{self.source}: switch {switch!r} is above itself")

    @cached_property
    def fabric_of(self) -> dict[str, str]:
        """Node -> name of its fabric: the topmost switch above the node.

        Nodes in blocks (Slurm's topology/block) have no switches: all of them get the name BLOCKS.
        """
        # Union-find: each switch points to a switch of the same fabric, the root of a fabric to
        # itself.
        parents = {unit.name: unit.name for unit in self.units}

        def root(name: str) -> str:
            """Return the topmost switch above a switch, as far as the links read so far show it."""
            while parents.setdefault(name, name) != name:
                name = parents[name]
            return name

        for unit in self.units:
            for switch in unit.switches:
                parents[root(switch)] = root(unit.name)
        fabrics = {}
        for unit in self.units:
            for node in unit.nodes:
                # Blocks are parts of one network. Slurm describes no switches of it.
                fabrics[node] = BLOCKS if unit.block else root(unit.name)
        return fabrics


def parse_topology(text: str, source: str) -> Topology:
    """Return the topology that a file or the output of a command describes.

    Args:
        text: Output of `scontrol show topology`, or content of topology.conf or topology.yaml.
        source: The command, or the path of the file. Its end tells YAML from the other formats.

    Raises:
        HolmesError: the text is wrong. The message names the line.
    """
    if source.endswith((".yaml", ".yml")):
        return Topology(tuple(_parse_yaml_units(text, source)), source)
    units: dict[str, Unit] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        without_comment = line.partition("#")[0]
        for keys in _split_records(without_comment):
            unit = _parse_unit(keys, f"{source}: line {number}")
            # The same unit may be listed again, but only with the same nodes.
            if unit is not None and units.setdefault(unit.name, unit) != unit:
                raise HolmesError(
                    f"{source}: line {number}: {unit.name!r} is given twice, with other nodes"
                )
    return Topology(tuple(units.values()), source)


def _split_records(line: str) -> Iterator[dict[str, str]]:
    """Yield the values of each switch or block on a line, by their keys in lower case.

    A switch or block begins with SwitchName= or BlockName=.
    """
    keys: dict[str, str] = {}
    matches = list(_KEY.finditer(line))
    ends = [match.start() for match in matches[1:]] + [len(line)]
    for match, end in zip(matches, ends):
        key = match[1].lower()
        if key in ("switchname", "blockname") and keys:
            yield keys
            keys = {}
        keys[key] = line[match.end() : end].strip()
    if keys:
        yield keys


def _parse_unit(keys: Mapping[str, str], where: str) -> Unit | None:
    """Return the switch or block that has the values, None for a line without one (BlockSizes=...).

    Args:
        keys: Key in lower case -> value.
        where: File and line, for the error message.

    Raises:
        HolmesError: a value is not a host list.
    """
    name = keys.get("blockname") or keys.get("switchname")
    if not name:
        return None
    switches = tuple(expand(keys.get("switches", ""), where))
    nodes: tuple[str, ...] = ()
    if not switches:  # an upper switch repeats the nodes of the switches below it
        nodes = tuple(expand(keys.get("nodes", ""), where))
    return Unit(name, nodes, switches, block="blockname" in keys)


def _parse_yaml_units(text: str, source: str) -> Iterator[Unit]:
    """Yield the switches and blocks of a topology.yaml.

    If the file has several topologies, the default topology counts, or else the first.

    Args:
        text: Content of the file.
        source: Path of the file, for error messages.

    Raises:
        HolmesError: PyYAML is not installed, or the text is not a topology.yaml.
    """
    topology = _default_topology(text, source)
    where = f"{source}: topology {topology.get('topology')!r}"
    for entry in _entries_of(topology, "tree", "switches", where):
        switches = tuple(expand(str(entry.get("children") or ""), where))
        nodes: tuple[str, ...] = ()
        if not switches:
            nodes = tuple(expand(str(entry.get("nodes") or ""), where))
        yield Unit(str(entry.get("switch")), nodes, switches)
    for entry in _entries_of(topology, "block", "blocks", where):
        nodes = tuple(expand(str(entry.get("nodes") or ""), where))
        yield Unit(str(entry.get("block")), nodes, block=True)


def _default_topology(text: str, source: str) -> dict[str, Any]:
    """Return the topology that is marked as the default in a topology.yaml, or the first.

    Args:
        text: Content of the file.
        source: Path of the file, for error messages.

    Raises:
        HolmesError: PyYAML is not installed, or the text is not a topology.yaml.
    """
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
    topologies: list[dict[str, Any]] = []
    if isinstance(document, list):
        topologies = [entry for entry in document if isinstance(entry, dict)]
    if not topologies:
        raise HolmesError(f"{source}: not Slurm's topology.yaml, which is a list of topologies")
    for topology in topologies:
        if topology.get("cluster_default") is True:
            return topology
    return topologies[0]


def _entries_of(
    topology: Mapping[str, Any], kind: str, key: str, where: str
) -> Sequence[dict[str, Any]]:
    """Return the switches or blocks of a topology in YAML, () if it has none.

    Args:
        topology: The topology.
        kind: "tree" or "block".
        key: "switches" or "blocks".
        where: File and topology, for the error message.

    Raises:
        HolmesError: the value is not a list of YAML mappings.
    """
    section = topology.get(kind)
    if not isinstance(section, dict):
        return ()
    entries = section.get(key)
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise HolmesError(f"{where}: {kind}.{key} is not a list of them")
    return entries
