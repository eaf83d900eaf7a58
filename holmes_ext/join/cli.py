"""`holmes join`: the coordinator of jobs that train one model together, each on a cluster of its own."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from importlib.util import find_spec
from typing import Any

from holmes_ext import extensions
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import PORT
from holmes_ext.join.coordinator.client import ask_status
from holmes_ext.join.coordinator.relay import PeerRelay
from holmes_ext.join.coordinator.server import CoordinatorServer
from holmes_ext.join.sockets.certificates import MISSING
from holmes_ext.join.sockets.handshake import Credentials, printable
from holmes_ext.join.token import exposure_of, served_token, token_from, warning_of
from holmes_ext.runtime.sockets import split_address
from holmes_ext.units import format_rate

_EPILOG = """\
  holmes join serve              anywhere that all clusters reach; says where the run's token is
  HOLMES_JOIN_TOKEN=... COMMAND --holmes --holmes-join east@HOST:PORT
                                 in each cluster, with a name of its own
  holmes join status HOST:PORT   needs the token as well, on other hosts than that of `serve`

Encrypted between hosts (TLS 1.3). Ports, directions and firewalls: docs/joined_network.md.
"""
COLUMNS = (
    Column("job"),
    Column("state"),
    Column("ranks", right=True),
    Column("step", right=True),
    Column("round", right=True),
    Column("counted", right=True),
    Column("missed", right=True),
    Column("lag, s", right=True),
    Column("steps/s", right=True, drop=2),
    Column("sends", right=True, drop=3),
    Column("drift", right=True, drop=4),
    Column("relayed, MB", right=True, drop=2),
    Column("heard, s ago", right=True, drop=1),
)
_ABOUT = "The coordinator of jobs that train one model together, each on a cluster of its own."


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "join",
        help="the coordinator of jobs that train one model together",
        description=_ABOUT,
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    serve = actions.add_parser(
        "serve",
        help="run the coordinator (it may be restarted)",
        description="Runs the coordinator of joined jobs, on a machine that all "
        "can reach. It may be restarted: jobs reconnect by themselves.",
    )
    serve.add_argument(
        "--host", default="", help="address to listen on (default: all, IPv4 and IPv6)"
    )
    serve.add_argument(
        "--port",
        type=int,
        default=PORT,
        help=f"port to listen on (default: {PORT}; 0: any free one, which is printed)",
    )
    serve.add_argument(
        "--relay",
        metavar="GB",
        default="",
        help="relay so many gigabytes between ranks that cannot reach each other, then no "
        "more (0: none; default: no limit)",
    )
    status = actions.add_parser(
        "status",
        help="who is in, which round, how fast, how late",
        description="Which jobs are in, at which round, how fast and how late. Exit "
        "status 1 when one is late or gone.",
    )
    here = f"127.0.0.1:{PORT}"
    status.add_argument(
        "where",
        metavar="HOST:PORT",
        nargs="?",
        default=here,
        help=f"where `holmes join serve` runs (default: {here})",
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    for command in (serve, status):
        command.add_argument(
            "--plain",
            action="store_true",
            default=os.environ.get("HOLMES_JOIN_PLAIN") == "on",
            help="do not encrypt (HOLMES_JOIN_PLAIN=on): anyone on the path can read it",
        )
        command.add_argument(
            "--certificate",
            metavar="FILE",
            default=os.environ.get("HOLMES_JOIN_CERTIFICATE", ""),
            help="PEM of a site's CA (HOLMES_JOIN_CERTIFICATE)",
        )
        command.add_argument(
            "--ca",
            metavar="FILE",
            default=os.environ.get("HOLMES_JOIN_CA", ""),
            help="PEM of that CA (HOLMES_JOIN_CA)",
        )


def run(args: argparse.Namespace) -> int:
    return _serve(args) if args.action == "serve" else _status(args)


def _serve(args: argparse.Namespace) -> int:
    """Until it is interrupted."""
    if not 0 <= args.port < 65536:
        raise HolmesError(f"holmes join serve: --port {args.port} is not a port from 0 to 65535")
    relay = PeerRelay(_relay_bytes(args.relay), _tell)
    token, file = served_token(os.environ, args.port)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each rank behind NAT
    server = CoordinatorServer(
        args.host,
        args.port,
        _credentials(token, args),
        _tell,
        relay,
        services=list(extensions.objects("join_services").values()),
    )
    where = f"; the token is in {file}" if file is not None else ""
    print(f"holmes: jobs meet at port {server.port} of this host{where}", flush=True)
    if file is not None and sys.stdout.isatty():
        print(f"holmes: HOLMES_JOIN_TOKEN={token}", flush=True)
    exposed = exposure_of(file) if file is not None else ""
    for line in filter(None, (warning_of(token), exposed, _privacy(args))):
        print(f"holmes: {line}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _relay_bytes(gigabytes: str) -> int | None:
    """None: no limit."""
    if not gigabytes:
        return None
    if not gigabytes.replace(".", "", 1).isdecimal() or len(gigabytes) > 12:
        raise HolmesError(
            f"holmes join serve: --relay {gigabytes!r:.40} is not a number of gigabytes"
        )
    return round(float(gigabytes) * 1e9)


def _credentials(token: str, args: argparse.Namespace) -> Credentials:
    if bool(args.certificate) != bool(args.ca):
        raise HolmesError("holmes join: give both --certificate and --ca, or none")
    return Credentials(token, args.plain, args.certificate, args.ca)


def _privacy(args: argparse.Namespace) -> str:
    """What a user should know of what crosses; "" where it is as it should be."""
    if args.plain:
        return "NOT encrypted (--plain): anyone on the path can read the weights"
    if not args.certificate and find_spec("cryptography") is None:
        return f"only jobs of this host can join: {MISSING}"
    return ""


def _tell(line: str) -> None:
    try:
        print(f"{time.strftime('%H:%M:%S')} {printable(line, 1000)}", flush=True)
    except OSError:  # nobody reads any more; jobs still meet
        sys.stdout = open(os.devnull, "w")


def _status(args: argparse.Namespace) -> int:
    """1 when a job is late or gone."""
    try:
        host, port = split_address(args.where)
    except ValueError:
        raise HolmesError(f"holmes join status: {args.where!r:.100} is not HOST:PORT") from None
    status = ask_status(host, port, _credentials(token_from(os.environ, port), args))
    if args.json:
        print(json.dumps(status))
    else:
        screen = Screen()
        screen.table(
            COLUMNS,
            [_row(job) for job in status["jobs"]],
            title=f"round {status['round']}; the coordinator is up for {status['up_s']:.0f} s",
        )
        for event in status["events"][-8:]:
            screen.line(printable(str(event), 1000))
    return 0 if all(job["state"] in ("in", "waiting") for job in status["jobs"]) else 1


def _row(job: dict[str, Any]) -> list[str]:
    rate, bits, drift, relayed = (
        job.get(key) for key in ("steps_per_second", "bits_per_second", "drift", "relayed")
    )
    return [
        job["job"],
        job["state"],
        str(job["ranks"]),
        f"{job.get('step') or 0:.0f}",
        f"{job.get('round') or 0:.0f}",
        str(job["rounds"]),
        str(job["missed"]),
        f"{job['lag_s']:.1f}",
        "" if rate is None else f"{rate:.2f}",
        "" if bits is None else format_rate(bits),
        "" if drift is None else f"{drift:.2f}",
        f"{relayed / 1e6:.0f}" if relayed else "",
        f"{job['heard_s']:.0f}",
    ]
