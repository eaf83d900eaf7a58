"""Command `holmes probe`: measures all fabrics and the links between clusters, for cluster.toml.

A fabric is a network that connects some nodes, such as the InfiniBand of one cluster. `holmes plan`
predicts step times from the measured values.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any, NamedTuple

import holmes_ext
from holmes_ext.cluster.measured import measured_tables, write_measured_values
from holmes_ext.cluster.spec import load_spec
from holmes_ext.cluster.wan import MeasuredLink, MeasuredPair
from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process, detect

#: Smallest and largest value of --largest.
_SMALLEST_MIB = 0.004
_LARGEST_MIB = 1024

_EPILOG = """\
Start it on every node in the same way as the training. One process for each node is enough:

  torchrun --nnodes 8 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python
  \\
      holmes probe --cluster cluster.toml
  srun --ntasks 8 --ntasks-per-node 1 holmes probe --cluster cluster.toml
  holmes lab run --cluster cluster.toml -- holmes probe --cluster cluster.toml      on emulated clusters

Rank 0 replaces the file's [link.FABRIC] and [[measured]] tables and leaves the other lines as they
are. Each pair of clusters has a [[measured]] table: rate of several nodes at once, rate of one
stream, latency. If the file describes a flat network and the measurements agree, there are no such
tables. Exit status: 0 if everything was measured, 2 on bad usage, bad input or a network error.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `probe` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "probe",
        help="measure messages and ring all-reduces on every fabric and write them to cluster.toml",
        description="Measure how long messages and all-reduces take on every fabric, for `holmes plan`.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="FILE",
        help="cluster.toml, to which the times are written",
    )
    parser.add_argument(
        "--largest",
        type=float,
        default=16.0,
        metavar="MIB",
        help="largest message (default: 16 MiB)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure all fabrics. Rank 0 prints the values and writes them to cluster.toml. Return 0.

    Raises:
        HolmesError: the input is bad, or the measurement failed.
    """
    load_spec(args.cluster)  # raises if the file is wrong
    if not _SMALLEST_MIB <= args.largest <= _LARGEST_MIB:
        raise HolmesError(
            f"--largest: {args.largest:g} MiB; it must be {_SMALLEST_MIB} to {_LARGEST_MIB}"
        )
    process = detect(os.environ)
    if process.world_size <= 1:
        raise HolmesError(
            "holmes probe: one process has no link to measure; start it on two nodes or more"
            " (holmes probe --help says how)"
        )
    fabrics, cluster_pairs = _measure_all(args, process)
    if process.rank != 0:
        return 0
    if args.json:
        document: dict[str, Any] = {}
        for name, times in fabrics.items():
            document[name] = dataclasses.asdict(times)
        document["measured"] = [dataclasses.asdict(pair) for pair in cluster_pairs]
        print(json.dumps(document))
    else:
        print(measured_tables(fabrics, cluster_pairs), end="")
    if not args.dry_run:
        write_measured_values(args.cluster, fabrics, cluster_pairs)
        written = [*fabrics, *("-".join(pair.clusters) for pair in cluster_pairs)]
        print(f"holmes probe: wrote {', '.join(written)} to {args.cluster}", file=sys.stderr)
    return 0


class _Measured(NamedTuple):
    """Measured values of all fabrics, and of the network between each pair of clusters."""

    fabrics: dict[str, MeasuredLink]  # name of a fabric -> times of messages on it
    #: Rate and latency between each pair of clusters; () if nodes of different clusters are
    #: connected as well as nodes of the same cluster.
    cluster_pairs: tuple[MeasuredPair, ...]


def _measure_all(args: argparse.Namespace, process: Process) -> _Measured:
    """Measure all fabrics, and the network between each pair of clusters.

    All ranks must call this function.

    Args:
        args: Arguments of `holmes probe`.
        process: This process, with its rank.

    Raises:
        HolmesError: the measurement failed.
    """
    # `holmes --help` imports this module, and must not import torch.
    import torch
    import torch.distributed as dist

    from holmes_ext.runtime.measure import crossings, probe

    def print_progress(text: str) -> None:
        if process.rank == 0:
            print(f"holmes probe: {text}", file=sys.stderr, flush=True)

    holmes_ext._enable_on_nodes(args.cluster)
    has_gpu = torch.accelerator.is_available()
    if has_gpu:
        torch.accelerator.set_device_index(process.local_rank)
    try:
        dist.init_process_group("nccl" if has_gpu else "gloo")
        current = session.require()
        cluster_pairs = crossings.measure(current, print_progress)
        # Flat: nodes of different clusters reach each other as fast as nodes of the same cluster.
        # This holds if the file describes no network between the clusters, and the measured rates
        # between clusters are about those of the NICs. On a flat network, Ethernet is measured
        # between nodes of different clusters, too. Otherwise it is measured inside clusters only.
        is_flat = not current.site.wan and crossings.is_flat(current.site, cluster_pairs)
        largest_bytes = int(args.largest * 2**20)
        fabrics = probe.measure(current, largest_bytes, tell=print_progress, flat=is_flat)
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        rank = f"rank {process.rank} ({session.require().node.name})"
        raise HolmesError(f"holmes probe: {rank}: {reason:.200}; nothing was written") from None
    if not fabrics and not cluster_pairs:
        raise HolmesError(
            "holmes probe: all processes are on one node, which has no link to measure;"
            " start one on every node"
        )
    return _Measured(fabrics, () if is_flat else cluster_pairs)
