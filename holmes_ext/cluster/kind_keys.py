"""Checks the keys `kind`, `fabric` and `net` of a [[cluster]]: together they name its fast network."""

from __future__ import annotations

from holmes_ext.cluster.fabric import is_built_in, kinds_of_network
from holmes_ext.cluster.nic import CLUSTER_KINDS, KINDS
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

_LONGEST_NET = 64


def check_kind(table: Table, kind: str) -> None:
    """Raise HolmesError if a cluster cannot have this kind of NIC.

    Args:
        table: The cluster's table, for the name of the key.
        kind: Value of the key `kind`.
    """
    if kind in CLUSTER_KINDS:
        return
    key = table.at("kind")
    if kind == "iwarp":
        raise HolmesError(
            f'{key}: NCCL cannot connect over iWARP NICs, only over their sockets; write kind = "ethernet"'
        )
    meant = [name for name in CLUSTER_KINDS if kind.lower() in (name, *KINDS[name].words)]
    meant += [name for name in kinds_of_network(kind) if name not in meant]
    advice = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    raise HolmesError(
        f"{key}: {kind!r:.80} is not one of {', '.join(CLUSTER_KINDS)} (plugin: any other network of an "
        f"NCCL plugin){advice}"
    )


def check_network(table: Table, kind: str, fabric: str, net: str) -> None:
    """Raise HolmesError if the keys `fabric` and `net` of a cluster do not fit its kind of NIC.

    Args:
        table: The cluster's table. It shows whether a key was given.
        kind: Value of the key `kind`.
        fabric: Value of the key `fabric`, or its default.
        net: Value of the key `net`, "" without it.
    """
    # NCCL and its plugins choose names of networks freely, so only nonsense is rejected.
    if "net" in table.values and (not net.isprintable() or not 0 < len(net) <= _LONGEST_NET):
        raise HolmesError(
            f'{table.at("net")}: {net!r:.80} is not a network of NCCL\'s ("Libfabric")'
        )
    if kind == "ethernet":
        _check_ethernet(table, fabric, net)
        return
    if fabric == "ethernet":
        advice = f"name the {kind} fabric otherwise"
        raise HolmesError(f"{table.at('fabric')}: 'ethernet' is the network of all nodes; {advice}")
    if net and is_built_in(net) and not KINDS[kind].verbs:
        raise HolmesError(
            f"{table.at('net')}: NCCL's own network {net!r} cannot use NICs of kind {kind!r}, which need a "
            "plugin; name the plugin's network, or remove the key: it is read from the installed plugin"
        )


def _check_ethernet(table: Table, fabric: str, net: str) -> None:
    """Raise HolmesError if a cluster without fast NICs names a fast network.

    Args:
        table: The cluster's table, for the names of the keys.
        fabric: Value of the key `fabric`, or its default.
        net: Value of the key `net`, "" without it.
    """
    if net and not is_built_in(net):
        kinds = kinds_of_network(net) or ("plugin",)
        if fabric in kinds:
            kinds = (fabric,)
        advice = " or ".join(f'kind = "{name}"' for name in kinds)
        raise HolmesError(
            f"{table.at('net')}: a cluster of kind 'ethernet' has no fast NIC for the network {net!r} of an "
            f"NCCL plugin; write {advice} and the rate of these NICs"
        )
    if net:
        raise HolmesError(
            f"{table.at('net')}: a cluster of kind 'ethernet' has no fast NIC and goes over NCCL's sockets; "
            "remove it"
        )
    if fabric != "ethernet":
        meant = [name for name in CLUSTER_KINDS if fabric.lower() in (name, *KINDS[name].words)]
        fast_kinds = [name for name in CLUSTER_KINDS if name != "ethernet"]
        advice = f"the kind of the fast NICs ({', '.join(fast_kinds)})"
        if meant:
            advice = f'kind = "{meant[0]}"'
        raise HolmesError(
            f"{table.at('fabric')}: a cluster of kind 'ethernet' has no fast NIC, so its only fabric is "
            f"'ethernet'; remove the key, or write {advice}"
        )
