"""The deepspeed launcher's hostfile, as a rank can see it: are its hosts the nodes of cluster.toml?

    deepspeed --hostfile FILE train.py ...                              reads FILE, reaches every host of it
      -> python -m deepspeed.launcher.launch --world_info=BASE64 ...    on each host: {"a0":
                                                                        [0, 1], "b0": [0, 1]}
           -> python train.py ...                                       a rank; the hosts are
                                                                        in its parent's command
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError

_FLAG = "--world_info"


def launched_hosts(pid: int | None = None) -> dict[str, int]:
    """Host -> processes, in order, of a deepspeed launcher `pid` (default: the parent); else empty."""
    place = Path("/proc", str(os.getppid() if pid is None else pid), "cmdline")
    try:
        arguments = place.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    for item, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = item.partition("=")
        if name == _FLAG:
            return _decode(value if equals else following)
    return {}


def _decode(text: str) -> dict[str, int]:
    try:
        return {host: len(slots) for host, slots in json.loads(base64.urlsafe_b64decode(text)).items()}
    except (ValueError, AttributeError, TypeError):
        return {}  # another program's flag of that name


def check_hosts(hosts: dict[str, int], spec: SiteSpec) -> None:
    """HolmesError when hostfile and cluster.toml cannot be the same nodes (aliases may be meant)."""
    if not hosts:
        return
    known = {host: name for host in hosts if (name := spec.known_as(host))}
    count = len(spec.owner)
    counts = f"the deepspeed launcher's hostfile has {len(hosts)} hosts, {spec.source} {count} nodes"
    if len(hosts) > count:
        extra = next(name for name in hosts if name not in known)
        way_out = "add it to a cluster's nodes, or take it out of the hostfile"
        raise HolmesError(f"{counts}: host {extra!r} is in no cluster; {way_out}")
    for host, name in known.items():
        cluster = spec.cluster_of(name)
        if hosts[host] != cluster.processes:
            key = f"in {spec.source} key 'cluster.{cluster.name}.processes' is {cluster.processes}"
            started = f"the deepspeed launcher's hostfile starts {hosts[host]} processes on {host!r}"
            raise HolmesError(f"{started}, but {key}; make the slots and the key agree")
