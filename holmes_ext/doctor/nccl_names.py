"""Expands NCCL_SOCKET_IFNAME and NCCL_IB_HCA as NCCL does, and checks the NICs that they select.

The rules come from NCCL's source (parseStringList and matchIfList in src/misc/utils.cc, ncclIbInitDevices
in src/transport/net_ib, ncclFindInterfaces in src/misc/socket.cc):

    eth,ib0           names are prefixes, and alternatives: a device is taken if any of them fits
    =eth0             the names after "=" are whole names
    ^docker,lo        all devices but these are taken; "^=docker0" excludes a whole name
    mlx5_0:1          port 1 of an HCA; without ":", all its ports
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.sysfs.node import FOREIGN
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.words import grouped, some_of

#: Reason of a finding about a valid setting: holmes does not replace it.
LEFT_ALONE = "holmes keeps your setting"
_ANY_PORT = -1
_MOST_NAMED = 16  # HCAs that a message lists
_ETHERNET = "Ethernet"
_LOCAL = "inside this node only"
#: Parts of the reason in `Nic.skipped` of interfaces that reach nothing outside of their node.
_LOCAL_REASONS = (
    "container network",
    "management (USB",
    "virtual device",
    "without a physical NIC",
    "without an address",
)


class ListedName(NamedTuple):
    """One name of a list, such as "mlx5_0:1"."""

    name: str
    port: int  # _ANY_PORT without a port

    @property
    def text(self) -> str:
        """The name as the user wrote it in the variable, such as "mlx5_0:1"."""
        return self.name if self.port == _ANY_PORT else f"{self.name}:{self.port}"

    @property
    def is_family(self) -> bool:
        """True for the common start of the names of a vendor's HCAs, such as "mlx5_" or "bnxt_re"."""
        return self.port == _ANY_PORT and not self.name[-1].isdigit()


class NameList(NamedTuple):
    """Value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA."""

    names: tuple[ListedName, ...]
    excludes: bool  # the names are those of devices not to use
    exact: bool  # the names are whole names, not prefixes

    def names_match(self, listed: ListedName, device: str, port: int = _ANY_PORT) -> bool:
        """Return whether one name of the list fits a device.

        The answer is the same for a list of devices to use and for a list of devices not to use ("^").

        Args:
            listed: An item of `names`.
            device: Name of a network device or HCA.
            port: Port of the HCA.
        """
        fits = device == listed.name if self.exact else device.startswith(listed.name)
        return fits and (listed.port == port or _ANY_PORT in (listed.port, port))

    def selects(self, device: str, port: int = _ANY_PORT) -> bool:
        """Return whether the list makes NCCL use a device.

        Args:
            device: Name of a network device or HCA.
            port: Port of the HCA.
        """
        # An empty list fits every device, as in NCCL.
        is_listed = not self.names or any(
            self.names_match(listed, device, port) for listed in self.names
        )
        return is_listed != self.excludes


def parse_names(value: str) -> NameList:
    """Parse a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA into its list of names."""
    excludes = value.startswith("^")
    value = value.removeprefix("^")
    exact = value.startswith("=")
    names = []
    for item in value.removeprefix("=").split(","):
        name, colon, port_text = item.partition(":")
        if not name:
            continue
        # As C's atoi(): the digits at the start, 0 without any.
        digits = re.match(r"\s*([0-9]+)", port_text)
        port = int(digits[1]) if digits else 0
        names.append(ListedName(name, port if colon else _ANY_PORT))
    return NameList(tuple(names), excludes, exact)


def missing_interfaces(
    variable: str, value: str, missing: Sequence[str], existing: Collection[str]
) -> Finding:
    """Report as a problem that a variable names network interfaces that the node does not have.

    Args:
        variable: Name of the variable.
        value: Its value.
        missing: Interfaces in the value that the node does not have.
        existing: Interfaces that the node has.
    """
    return problem(
        variable,
        what=f"{value!r} names {', '.join(missing)}, which this node does not have "
        f"({', '.join(sorted(existing))})",
        why="the library ends with an error, or waits for an interface that never comes "
        "(NVIDIA/nccl#1580)",
        mend=f"unset {variable}: holmes sets it on each node",
    )


def check_socket_names(value: str, nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding about NCCL_SOCKET_IFNAME.

    NCCL uses every interface that the variable selects, and that is up and has an address. It is a
    problem if there is no such interface, or if they are not all on one network that reaches other
    nodes. Otherwise the finding is a note that holmes keeps the setting.

    Args:
        value: Value of the variable, "" if it is not set.
        nics: The NICs of the node.
    """
    if len(value) <= 1:  # NCCL ignores such values
        return
    variable = "NCCL_SOCKET_IFNAME"
    listed = parse_names(value)
    nic_of = {name: nic for nic in reversed(nics) for name in nic.netdevs}
    existing = {*nic_of, "lo"}
    named = [name for name in sorted(existing) if listed.selects(name)]
    if not named:
        missing = [item.text for item in listed.names] or ["all"]
        yield missing_interfaces(variable, value, missing, existing)
        return

    # In a copy of another machine's /sys (a captured tree), the addresses may be missing.
    are_addresses_known = any(nic.addresses for nic in nics)
    obstacles = {name: _socket_obstacle(nic_of.get(name), are_addresses_known) for name in named}
    usable = [name for name, obstacle in obstacles.items() if not obstacle]
    if usable:
        network_of = {name: _network_in_words(nic_of.get(name)) for name in usable}
        yield _note_or_problem_on_networks(value, network_of)
    else:
        listed_states = ", ".join(f"{name} ({obstacle})" for name, obstacle in obstacles.items())
        yield problem(
            variable,
            what=f"{value!r} selects only {listed_states}",
            why='NCCL ends with "no socket interface found"',
            mend=f"bring it up with an address, or unset {variable}: holmes sets it on each node",
        )


def _socket_obstacle(nic: Nic | None, are_addresses_known: bool) -> str:
    """Return why NCCL cannot open sockets on an interface, "" if it can.

    Args:
        nic: The NIC with the interface; None for loopback.
        are_addresses_known: Whether the addresses of the node's NICs are known.
    """
    if nic is None:
        return ""
    if not nic.up:
        return nic.state_text or "down"
    return "" if nic.addresses or not are_addresses_known else "no IP address"


def _note_or_problem_on_networks(value: str, network_of: Mapping[str, str]) -> Finding:
    """Return a note on NCCL_SOCKET_IFNAME, or a problem if other nodes cannot be reached by it.

    It is a problem if an interface reaches only this node, or if the interfaces are on several
    networks.

    Args:
        value: Value of the variable.
        network_of: Interface with sockets of NCCL -> its network: _ETHERNET, "IP over InfiniBand" or _LOCAL.
    """
    variable = "NCCL_SOCKET_IFNAME"
    names_of = grouped((network, name) for name, network in network_of.items())
    if len(names_of) == 1 and _LOCAL not in names_of:
        return note(
            variable,
            what=f"{value!r} selects {', '.join(network_of)}",
            why=LEFT_ALONE,  # "holmes keeps your setting"
            mend=f"unset {variable} unless it is meant so",
        )
    words = "; ".join(f"{', '.join(names)} ({network})" for network, names in names_of.items())
    best = names_of.get(_ETHERNET, ["DEVICE"])[0]  # "DEVICE" stands for a name that is not known
    return problem(
        variable,
        what=f"{value!r} selects {words}",
        why="NCCL opens sockets on every one of them, and not all of them reach the other nodes: "
        "groups hang while they connect",
        mend=f'unset {variable}: holmes sets it on each node; or export {variable}="={best}" ("=": the '
        "whole name)",
    )


def _network_in_words(nic: Nic | None) -> str:
    """Return the network of an interface: "Ethernet", "IP over InfiniBand" or "inside this node only".

    Loopback, container bridges and other virtual devices do not reach other nodes.

    Args:
        nic: The NIC with the interface; None for loopback.
    """
    if nic is None or any(reason in nic.skipped for reason in _LOCAL_REASONS):
        return _LOCAL
    return "IP over InfiniBand" if KINDS[nic.kind].infiniband else _ETHERNET


def check_hca_names(value: str, nics: Sequence[Nic], unused: Collection[str]) -> Iterator[Finding]:
    """Yield at most one finding about NCCL_IB_HCA: the first of these that applies.

    The list names HCAs that the node does not have. It names HCAs that are down. Or the finding is
    about the HCAs that the list selects, or about a list that excludes all HCAs.

    Args:
        value: Value of the variable, "" if it is not set.
        nics: The fast NICs of the node.
        unused: Names of the NICs that cluster.toml leaves out.
    """
    if not value:
        return
    variable = "NCCL_IB_HCA"
    listed = parse_names(value)

    # NCCL's network "IB" has the ports with these two link layers.
    verbs_nics = [nic for nic in nics if KINDS[nic.kind].layer in ("InfiniBand", "Ethernet")]
    existing = some_of((nic.name for nic in verbs_nics), _MOST_NAMED) or "none"
    unset = f"unset {variable}: holmes sets it on each node"
    missing = []
    down = []
    for item in () if listed.excludes else listed.names:
        matched = [nic for nic in verbs_nics if listed.names_match(item, nic.device, nic.port)]
        if not matched:
            missing.append(item)
        elif not any(nic.up for nic in matched):
            down.append(item.text)
    selected = [nic for nic in verbs_nics if nic.up and listed.selects(nic.device, nic.port)]

    # "mlx5_,bnxt_re" is meant for nodes with HCAs of either vendor. So the start of a vendor's names
    # may match no HCA of this node, if another name of the list does.
    are_families_alternatives = bool(selected) and not listed.exact
    unwanted = [item.text for item in missing if not (are_families_alternatives and item.is_family)]
    if unwanted:
        yield problem(
            variable,
            what=f"{value!r} names {', '.join(unwanted)}, which this node does not have "
            f"(its HCAs: {existing})",
            why="NCCL skips it silently and takes what is left, or sockets; ranks then disagree and "
            "hang (NVIDIA/nccl#1277)",
            mend=unset,
        )
        return
    if down:
        yield problem(
            variable,
            what=f"{value!r} names {', '.join(down)}, which is down",
            why="NCCL leaves it out on this node only",
            mend="bring the port up or take it out",
        )
        return
    if selected:
        yield from _check_selected_hcas(value, listed, selected, unused)
    elif listed.excludes and verbs_nics:
        yield problem(
            variable,
            what=f"{value!r} leaves no HCA that is up (its HCAs: {existing})",
            why="NCCL groups of this node go over TCP sockets",
            mend=unset,
        )


def _check_selected_hcas(
    value: str, listed: NameList, selected: Sequence[Nic], unused: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding about the HCAs that NCCL_IB_HCA selects.

    Faults are HCAs of several kinds, in another network namespace, or left out by cluster.toml. A list
    without a fault gives a note that holmes keeps the setting.

    Args:
        value: Value of the variable.
        listed: The names in it.
        selected: NICs that it selects, at least one.
        unused: Names of the NICs that cluster.toml leaves out.
    """
    variable = "NCCL_IB_HCA"
    names_of = grouped((nic.kind, nic.name) for nic in selected)
    words = "; ".join(f"{kind}: {some_of(names, _MOST_NAMED)}" for kind, names in names_of.items())
    prefixes = " (names are prefixes)" if listed.names and not listed.exact else ""
    foreign = [nic.name for nic in selected if nic.skipped == FOREIGN]
    left_out = [nic.name for nic in selected if nic.name in unused]
    if len(names_of) > 1:
        fewest_first = sorted(names_of.values(), key=len)
        exact = ",".join(fewest_first[-1])
        yield problem(
            variable,
            what=f"{value!r} selects HCAs of {len(names_of)} kinds{prefixes}: {words}",
            why="NCCL uses all of them for every group, and a connection between InfiniBand and Ethernet "
            'fails: "Remote device is incompatible with the local"',
            mend=f'unset {variable}: holmes sets it on each node; or export {variable}="={exact}" ("=": '
            "whole names)",
        )
    elif foreign:
        yield problem(
            variable,
            what=f"{value!r} selects {', '.join(foreign)}, whose net device is in another network namespace",
            why='a connection over it fails: "No such device" (NVIDIA/nccl#925)',
            mend=f"unset {variable}: holmes sets it on each node",
        )
    elif left_out:
        make = problem if len(left_out) == len(selected) else note
        yield make(
            variable,
            what=f"{value!r} selects {', '.join(left_out)}{prefixes}, which cluster.toml leaves out",
            why=f"{LEFT_ALONE}, so groups use these NICs, too",
            mend=f"unset {variable}: holmes sets it on each node",
        )
    elif listed.excludes:
        return  # a list of HCAs not to use fits every node, so it needs no note
    else:
        yield note(
            variable,
            what=f"{value!r} selects {some_of((nic.name for nic in selected), _MOST_NAMED)}{prefixes}",
            why=LEFT_ALONE,  # "holmes keeps your setting"
            mend=f"unset {variable} unless it is meant so",
        )
