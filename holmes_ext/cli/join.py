"""`holmes join`: the coordinator of jobs that train one model together, each on a cluster of its own."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.address import PORT, token_from
from holmes_ext.runtime.outer.coordinator.client import ask_status
from holmes_ext.runtime.outer.coordinator.server import Server
from holmes_ext.units import format_rate

_EPILOG = """\
  holmes join serve                     anywhere that all clusters reach; prints the token where none is given
  HOLMES_JOIN_TOKEN=... COMMAND --holmes --holmes-join east@HOST:PORT      in each cluster, with a name of its own
  holmes join status HOST:PORT

Nothing is encrypted: between sites, use WireGuard or IPsec. See docs/joined.md.
"""
COLUMNS = (
    Column("job"), Column("state"), Column("ranks", right=True), Column("step", right=True),
    Column("round", right=True),
    Column("counted", right=True), Column("missed", right=True), Column("lag, s", right=True),
    Column("steps/s", right=True, drop=2), Column("sends", right=True, drop=3), Column("drift", right=True, drop=4),
    Column("heard, s ago", right=True, drop=1),
)  # fmt: skip
_ABOUT = "The coordinator of jobs that train one model together, each on a cluster of its own."


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "join", help="the coordinator of jobs that train one model together", description=_ABOUT, epilog=_EPILOG)
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    serve = actions.add_parser("serve", help="keep the coordinator (may be restarted: jobs come back by themselves)",
                               description="Keeps the coordinator of joined jobs, on a machine that all reach. It may"
                               " be restarted: jobs come back by themselves.")
    serve.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    serve.add_argument("--port", type=int, default=PORT,
                       help=f"port to listen on (default: {PORT}; 0: any free one, which is printed)")
    status = actions.add_parser("status", help="who is in, which round, how fast, how late",
                                description="Which jobs are in, at which round, how fast and how late. Exit status 1"
                                " when one is late or gone.")
    here = f"127.0.0.1:{PORT}"
    status.add_argument("where", metavar="HOST:PORT", nargs="?", default=here,
                        help=f"where `holmes join serve` runs (default: {here})")
    status.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    return _serve(args) if args.action == "serve" else _status(args)


def _serve(args: argparse.Namespace) -> int:
    """Until it is interrupted."""
    given = os.environ.get("HOLMES_JOIN_TOKEN") or os.environ.get("HOLMES_JOIN_TOKEN_FILE")
    token = token_from(os.environ) if given else secrets.token_urlsafe(18)
    if not 0 <= args.port < 65536:
        raise HolmesError(f"holmes join serve: --port {args.port} is not a port from 0 to 65535")
    server = Server(args.host, args.port, token, _tell)
    secret = "" if given else f"; HOLMES_JOIN_TOKEN={token}"
    print(f"holmes: jobs meet at port {server.port} of this host{secret}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _tell(line: str) -> None:
    try:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
    except OSError:  # nobody reads any more; jobs still meet
        sys.stdout = open(os.devnull, "w")


def _status(args: argparse.Namespace) -> int:
    """1 when a job is late or gone."""
    host, _, port = args.where.rpartition(":")
    if not host or not port.isdecimal():
        raise HolmesError(f"holmes join status: {args.where!r} is not HOST:PORT")
    found = ask_status(host, int(port), token_from(os.environ))
    if args.json:
        print(json.dumps(found))
    else:
        screen = Screen()
        screen.table(COLUMNS, [_row(job) for job in found["jobs"]], title=
                     f"round {found['round']}; the coordinator is up for {found['up_s']:.0f} s")
        for event in found["events"][-8:]:
            screen.line(event)
    return 0 if all(job["state"] in ("in", "waiting") for job in found["jobs"]) else 1


def _row(job: dict[str, Any]) -> list[str]:
    """Of COLUMNS."""
    rate, bits, drift = job.get("steps_per_second"), job.get("bits_per_second"), job.get("drift")
    return [
        job["job"], job["state"], str(job["ranks"]), str(job.get("step") or 0), str(job.get("round") or 0),
        str(job["rounds"]), str(job["missed"]), f"{job['lag_s']:.1f}", "" if rate is None else f"{rate:.2f}",
        "" if bits is None else format_rate(bits), "" if drift is None else f"{drift:.2f}", f"{job['heard_s']:.0f}",
    ]  # fmt: skip
