"""`holmes join serve` and `holmes join status`: the coordinator of joined jobs, and the state of their run.

Joined jobs train one model together, each on its own cluster (docs/joined.md).
"""

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
  holmes join serve              on a host that all clusters reach; prints where the run's token is
  HOLMES_JOIN_TOKEN=... COMMAND --holmes --holmes-join east@HOST:PORT
                                 in each cluster, with another name
  holmes join status HOST:PORT   needs the token on other hosts than that of `serve`

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
_ABOUT = "Coordinate jobs that train one model together, each on its own cluster."
#: Number of TCP ports.
_PORTS = 65536
#: Characters of a number of gigabytes.
_LONGEST_NUMBER = 12
#: Characters of a line of the log.
_LONGEST_LINE = 1000
#: Lines of the log that `holmes join status` prints.
_EVENTS = 8
_BYTES_PER_MB = 1e6
_BYTES_PER_GB = 1e9


def add_parser(subparsers: Any) -> None:
    """Add `holmes join` to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "join",
        help="coordinate jobs that train one model together",
        description=_ABOUT,
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    serve = actions.add_parser(
        "serve",
        help="run the coordinator (it may be restarted)",
        description="Run the coordinator of joined jobs, on a host that all of them "
        "reach. It may be restarted: jobs reconnect by themselves.",
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
        help="gigabytes to relay between ranks that cannot reach each other, in all (0: none; "
        "default: no limit)",
    )
    status = actions.add_parser(
        "status",
        help="show the jobs of a run, their round, speed and delay",
        description="Show the jobs of a run, their round, speed and delay. Exit "
        "status 1 if a job is late or gone.",
    )
    default_address = f"127.0.0.1:{PORT}"
    status.add_argument(
        "where",
        metavar="HOST:PORT",
        nargs="?",
        default=default_address,
        help=f"address of `holmes join serve` (default: {default_address})",
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
            help="PEM file with certificate, chain and key (HOLMES_JOIN_CERTIFICATE)",
        )
        command.add_argument(
            "--ca",
            metavar="FILE",
            default=os.environ.get("HOLMES_JOIN_CA", ""),
            help="PEM file of the CA (HOLMES_JOIN_CA)",
        )


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    return _serve(args) if args.action == "serve" else _status(args)


def _serve(args: argparse.Namespace) -> int:
    """Run the coordinator until it is interrupted (Ctrl-C); return exit status 0.

    Raises:
        HolmesError: An argument or the token is invalid, or the port is in use.
    """
    if not 0 <= args.port < _PORTS:
        raise HolmesError(f"holmes join serve: --port {args.port} is not a port from 0 to 65535")
    relay = PeerRelay(_relay_bytes(args.relay), _log)
    token, file = served_token(os.environ, args.port)  # file: None if the environment has the token
    _raise_file_limit()  # each rank behind NAT keeps a connection to the coordinator
    # Installed extensions may contribute services that run beside the coordinator, such as metrics.
    services = list(extensions.objects("join_services").values())
    server = CoordinatorServer(
        args.host, args.port, _credentials(token, args), _log, relay, services=services
    )
    location = f"; the token is in {file}" if file is not None else ""
    print(f"holmes: jobs meet at port {server.port} of this host{location}", flush=True)
    # The token is a secret: it is shown on a terminal, but not written to a log.
    if file is not None and sys.stdout.isatty():
        print(f"holmes: HOLMES_JOIN_TOKEN={token}", flush=True)
    exposure = exposure_of(file) if file is not None else ""
    for line in (warning_of(token), exposure, _privacy_warning(args)):
        if line:
            print(f"holmes: {line}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _raise_file_limit() -> None:
    """Allow as many open files as possible: each rank behind NAT keeps a connection."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _relay_bytes(gigabytes: str) -> int | None:
    """Return the value of --relay in bytes, from a text in gigabytes: "1.5" -> 1500000000.

    Returns:
        The limit in bytes; None: no limit, because the text is empty.

    Raises:
        HolmesError: The text is not a number of gigabytes.
    """
    if not gigabytes:
        return None
    is_number = gigabytes.replace(".", "", 1).isdecimal()
    if not is_number or len(gigabytes) > _LONGEST_NUMBER:
        raise HolmesError(
            f"holmes join serve: --relay {gigabytes!r:.40} is not a number of gigabytes"
        )
    return round(float(gigabytes) * _BYTES_PER_GB)


def _credentials(token: str, args: argparse.Namespace) -> Credentials:
    """Return the token and the certificates that the arguments name."""
    if bool(args.certificate) != bool(args.ca):
        raise HolmesError("holmes join: give both --certificate and --ca, or none")
    return Credentials(token, args.plain, args.certificate, args.ca)


def _privacy_warning(args: argparse.Namespace) -> str:
    """Return a warning if traffic is not encrypted, or cannot be; else ""."""
    if args.plain:
        return "NOT encrypted (--plain): anyone on the path can read the weights"
    if not args.certificate and find_spec("cryptography") is None:
        return f"only jobs of this host can join: {MISSING}"
    return ""


def _log(line: str) -> None:
    """Print a line with the time of day."""
    try:
        print(f"{time.strftime('%H:%M:%S')} {printable(line, _LONGEST_LINE)}", flush=True)
    except OSError:  # the reader of the pipe has gone; the coordinator must go on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends


def _status(args: argparse.Namespace) -> int:
    """Print the jobs and the last events of a run, as `holmes join status HOST:PORT` does.

    Returns:
        Exit code 0 if every job trains or waits. It is 1 if a job is "late" (it missed a deadline)
        or "gone" (disconnected).
    """
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
        for event in status["events"][-_EVENTS:]:
            screen.line(printable(str(event), _LONGEST_LINE))
    all_are_well = all(job["state"] in ("in", "waiting") for job in status["jobs"])
    return 0 if all_are_well else 1


def _row(job: dict[str, Any]) -> list[str]:
    """Return the row of a job in the table of `holmes join status`; unknown values are empty.

    Args:
        job: An entry of "jobs" in CoordinatorServer.status().
    """
    rate = job.get("steps_per_second")
    bits = job.get("bits_per_second")
    drift = job.get("drift")
    relayed = job.get("relayed")
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
        f"{relayed / _BYTES_PER_MB:.0f}" if relayed else "",
        f"{job['heard_s']:.0f}",
    ]
