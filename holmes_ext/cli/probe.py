"""`holmes probe`: measure every fabric, and what lies between the clusters, into cluster.toml."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

import holmes_ext
from holmes_ext.cluster.measured import measured_tables, write_measured_values
from holmes_ext.cluster.spec import load_spec
from holmes_ext.cluster.wan import MeasuredLink, MeasuredPair
from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process, detect

_EPILOG = """\
Start it on every node as the training is started, one process for each node is enough:

  torchrun --nnodes 8 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python \\
      holmes probe --cluster cluster.toml
  srun --ntasks 8 --ntasks-per-node 1 holmes probe --cluster cluster.toml
  holmes lab run --cluster cluster.toml -- holmes probe --cluster cluster.toml      on emulated clusters

Rank 0 replaces the file's [link.FABRIC] and [[measured]] tables and leaves the rest as it is. [[measured]]
has every pair of clusters: rate of several nodes at once, rate of one stream, latency; it is left out where
the file describes a flat network and measuring found one.
Exit status: 0 measured, 2 bad usage, input or network.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "probe",
        help="measure messages and rings on every fabric, into cluster.toml",
        description="Measures how long messages and all-reduces take on every fabric, for `holmes plan`.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="cluster.toml, which gets the curves"
    )
    parser.add_argument(
        "--largest",
        type=float,
        default=16.0,
        metavar="MIB",
        help="largest message (default: 16 MiB)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--json", action="store_true", help="print the curves as JSON")


def run(args: argparse.Namespace) -> int:
    """0 when every fabric was measured; rank 0 writes and tells."""
    load_spec(args.cluster)
    if not 0.004 <= args.largest <= 1024:
        raise HolmesError(f"--largest: {args.largest:g} MiB; it must be 0.004 to 1024")
    process = detect(os.environ)
    if process.world_size < 2:
        raise HolmesError(
            "holmes probe: one process has no link to measure; start it on two nodes or more"
            " (holmes probe --help says how)"
        )
    links, pairs = _measure(args, process)
    if process.rank == 0:
        if args.json:
            between = [dataclasses.asdict(pair) for pair in pairs]
            print(
                json.dumps(
                    {
                        **{name: dataclasses.asdict(link) for name, link in links.items()},
                        "measured": between,
                    }
                )
            )
        else:
            print(measured_tables(links, pairs), end="")
        if not args.dry_run:
            write_measured_values(args.cluster, links, pairs)
            written = [*links, *("-".join(pair.clusters) for pair in pairs)]
            print(f"holmes probe: wrote {', '.join(written)} to {args.cluster}", file=sys.stderr)
    return 0


def _measure(
    args: argparse.Namespace, process: Process
) -> tuple[dict[str, MeasuredLink], tuple[MeasuredPair, ...]]:
    """All ranks; whatever goes wrong on the way is one line."""
    import torch
    import torch.distributed as dist

    # here: the session imports torch, `holmes --help` not
    from holmes_ext.runtime.measure import crossings, probe

    def tell(text: str) -> None:
        if process.rank == 0:
            print(f"holmes probe: {text}", file=sys.stderr, flush=True)

    holmes_ext.enable_on_nodes(args.cluster)
    gpu = torch.accelerator.is_available()
    if gpu:
        torch.accelerator.set_device_index(process.local_rank)
    try:
        dist.init_process_group("nccl" if gpu else "gloo")
        current = session.require()
        pairs = crossings.measure(current, tell)
        flat = not current.site.wan and crossings.is_flat(current.site, pairs)
        links = probe.measure(current, int(args.largest * 2**20), tell, flat)
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"rank {process.rank} ({session.require().node.name})"
        raise HolmesError(f"holmes probe: {where}: {reason:.200}; nothing was written") from None
    if not links and not pairs:
        raise HolmesError(
            "holmes probe: all processes are on one node, which has no link to measure;"
            " start one on every node"
        )
    return links, () if flat else pairs
