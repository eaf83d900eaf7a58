"""`holmes join serve`, `invite`, `revoke` and `status`: the coordinator of joined jobs, and their run.

Joined jobs train one model together, each on its own cluster (docs/joined.md).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from holmes_ext import extensions, join
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import PORT
from holmes_ext.join.coordinator.client import ask_status
from holmes_ext.join.coordinator.relay import PeerRelay
from holmes_ext.join.coordinator.server import CoordinatorServer
from holmes_ext.join.identity.job_certificate import status_credentials
from holmes_ext.join.identity.private_files import write_private
from holmes_ext.join.identity.run_folder import RunFolder, ServedRun
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.sockets.handshake import Credentials, printable
from holmes_ext.options import from_environment
from holmes_ext.runtime.sockets import address_text, split_address
from holmes_ext.units import format_rate
from holmes_ext.words import counted, print_line, why

_EPILOG = """\
  holmes join serve --outer every=64   on a host that all clusters reach
  holmes join invite east --output FILE
                                       there; FILE then goes to the host of rank 0 of job east
  COMMAND --holmes --holmes-join east@HOST:PORT --holmes-join-invitation FILE
                                       in each cluster, with another name
  holmes join status HOST:PORT         on the host of `serve`, or where a job of this user has joined
  holmes join revoke east              on the host of `serve`

All traffic is encrypted (TLS 1.3). Ports, directions and firewalls: docs/joined_network.md.
"""
COLUMNS = (
    Column("job", wrap=8),
    Column("state"),
    Column("ranks", right=True, drop=1),
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
    serve = _add_serve(actions)
    _add_invite_and_revoke(actions)
    status = _add_status(actions)
    for command in (serve, status):
        command.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
        command.add_argument(
            "--certificate",
            metavar="FILE",
            default=os.environ.get("HOLMES_JOIN_CERTIFICATE", ""),
            help=f"{join.CERTIFICATE_HELP}; also HOLMES_JOIN_CERTIFICATE",
        )
        command.add_argument(
            "--ca",
            metavar="FILE",
            default=os.environ.get("HOLMES_JOIN_CA", ""),
            help=f"{join.CA_HELP}; also HOLMES_JOIN_CA",
        )


def _add_serve(actions: Any) -> argparse.ArgumentParser:
    """Add `holmes join serve` to the subparsers of `holmes join`, and return its parser."""
    serve: argparse.ArgumentParser = actions.add_parser(
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
    serve.add_argument(
        "--outer",
        metavar="SETTINGS",
        default="",
        help="settings of the run for all jobs, such as every=64,fragments=4,min=2 (docs/joined.md; "
        "default: every=32,fragments=4,delay=5,...)",
    )
    return serve


def _add_invite_and_revoke(actions: Any) -> None:
    """Add `holmes join invite` and `holmes join revoke` to the subparsers of `holmes join`."""
    invite = actions.add_parser(
        "invite",
        help="make a one-time invitation for a job",
        description="Make a one-time invitation for a job, on the host of `holmes join serve`. Whoever "
        "has it first gets the job's certificate, so keep it secret.",
    )
    invite.add_argument(
        "--address",
        metavar="HOST",
        default="",
        help="host by which the job reaches the coordinator (default: the name of this host)",
    )
    invite.add_argument(
        "--output",
        metavar="FILE",
        default="",
        help="new file for the invitation (default: print it)",
    )
    revoke = actions.add_parser(
        "revoke",
        help="end a job's part in the run, and refuse its certificates",
        description="Refuse all certificates and invitations of a job, and end its connections. Run it "
        "on the host of `holmes join serve`.",
    )
    for command in (invite, revoke):
        command.add_argument("name", metavar="NAME", help="name of the job")
        command.add_argument(
            "--port",
            type=int,
            default=PORT,
            help=f"port of `holmes join serve` (default: {PORT})",
        )


def _add_status(actions: Any) -> argparse.ArgumentParser:
    """Add `holmes join status` to the subparsers of `holmes join`, and return its parser."""
    status: argparse.ArgumentParser = actions.add_parser(
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
    return status


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status.

    Raises:
        HolmesError: An argument or an environment variable is not valid, or the command fails.
    """
    # Refuses variables of removed options, such as HOLMES_JOIN_TOKEN.
    from_environment(os.environ)
    if getattr(args, "plain", False):
        raise HolmesError(
            "holmes join: --plain was removed; all traffic of joined jobs is encrypted"
        )
    match args.action:
        case "serve":
            return _serve(args)
        case "invite":
            return _invite(args)
        case "revoke":
            return _revoke(args)
    return _status(args)


def _serve(args: argparse.Namespace) -> int:
    """Run the coordinator until it is interrupted (Ctrl-C); return exit status 0.

    Raises:
        HolmesError: An argument is invalid, the port is in use, or another coordinator has the same
            state folder.
    """
    _check_port(args)
    # Forwards bytes between ranks that cannot reach each other, up to the limit of --relay.
    relay = PeerRelay(_relay_bytes(args.relay), _log)
    settings = _run_settings(args.outer)
    site_credentials = _site_credentials(args)  # None if the run makes its own CA
    _raise_file_limit()  # each rank behind NAT keeps a connection to the coordinator
    # Installed extensions may contribute services that run beside the coordinator, such as metrics.
    services = list(extensions.objects("join_services").values())
    with ExitStack() as running:

        def open_run(port: int) -> ServedRun:
            folder = RunFolder.of_port(os.environ, port)
            folder.make(with_authority=False)  # served() makes the run's CA, if it needs one
            running.enter_context(folder.serving())  # a folder has a single coordinator
            return folder.served(site_credentials)

        server = CoordinatorServer(
            args.host, args.port, open_run, _log, relay, services=services, settings=settings
        )
        running.callback(server.close)
        folder = RunFolder.of_port(os.environ, server.port).path
        print(
            f"holmes: jobs meet at port {server.port} of this host; state in {folder}", flush=True
        )
        print(
            f"holmes: settings of the run: {args.outer or 'the defaults (--outer changes them)'}",
            flush=True,
        )
        if site_credentials is None:
            print(
                f"holmes: jobs on other hosts need `holmes join invite NAME{_port_flag(server.port)}"
                " --output FILE`",
                flush=True,
            )
        with suppress(KeyboardInterrupt):
            server.serve()
    return 0


def _name_of_this_host() -> str:
    """Return the fully qualified name of this host, or its short name if the full one is "localhost"."""
    full_name = socket.getfqdn()
    return socket.gethostname() if full_name.startswith("localhost") else full_name


def _invite(args: argparse.Namespace) -> int:
    """Print an invitation of a job, or write it to a new file; return exit status 0.

    Raises:
        HolmesError: There is no run on this host, or the file exists.
    """
    _check_port(args)
    host = args.address or _name_of_this_host()
    address = address_text(host, args.port)
    if args.output and os.path.lexists(args.output):
        raise HolmesError(f"holmes join invite: {args.output} exists already; name a new file")
    try:
        split_address(address)
    except ValueError as error:
        raise HolmesError(f"holmes join invite: --address: {error}") from None
    invitation = RunFolder.of_port(os.environ, args.port).invite(args.name, address)
    flags = f"--holmes --holmes-join {args.name}@{address} --holmes-join-invitation"
    if not args.output:
        sys.stdout.write(invitation.text())
        print(
            f"holmes: keep it secret, in a file of mode 600; the job needs {flags} FILE",
            file=sys.stderr,
        )
        return 0
    try:
        write_private(Path(args.output), invitation.text())
    except OSError as error:
        raise HolmesError(
            f"holmes join invite: {args.output} cannot be written ({why(error)}); name a new file"
        ) from None
    print(f"holmes: {args.output} is the invitation of job {args.name}, for one use; the job needs")
    print(f"  {flags} {args.output}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    """Revoke the certificates and invitations of a job; return exit status 0."""
    _check_port(args)
    revoked = RunFolder.of_port(os.environ, args.port).revoke(args.name)
    print(
        f"holmes: job {args.name} is revoked: {counted(revoked.certificates, 'certificate')}, "
        f"{counted(revoked.invitations, 'open invitation')}"
    )
    return 0


def _check_port(args: argparse.Namespace) -> None:
    if not 0 <= args.port < _PORTS:
        raise HolmesError(
            f"holmes join {args.action}: --port {args.port} is not a port from 0 to 65535"
        )


def _port_flag(port: int) -> str:
    return "" if port == PORT else f" --port {port}"


def _run_settings(text: str) -> OuterSettings:
    """Return the settings of the run from the value of --outer.

    Raises:
        HolmesError: A setting is not valid, or is for a single job (`part`).
    """
    try:
        settings = parse_outer(text)
    except HolmesError as error:
        raise HolmesError(
            str(error).replace("--holmes-outer", "holmes join serve: --outer", 1)
        ) from None
    if settings.part != OuterSettings.part:
        raise HolmesError(
            f"holmes join serve: --outer part={settings.part} belongs to a job: give it --holmes-outer"
            f" part={settings.part}"
        )
    return settings


def _raise_file_limit() -> None:
    """Raise this process's limit of open files to its maximum; each rank behind NAT needs a connection."""
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


def _site_credentials(args: argparse.Namespace) -> Credentials | None:
    """Return the credentials in the files of --certificate and --ca.

    These flags are for a site (an organization) that has a CA of its own: its CA signs the certificates,
    not the CA that `holmes join serve` makes for each run.

    Returns:
        None if neither flag is given.

    Raises:
        HolmesError: Only one of the two is given, or the files cannot be used.
    """
    if bool(args.certificate) != bool(args.ca):
        raise HolmesError("holmes join: give both --certificate and --ca, or none")
    return Credentials.of_site(args.certificate, args.ca) if args.certificate else None


def _status_credentials(args: argparse.Namespace, host: str, port: int) -> Credentials:
    """Return credentials for a request for the coordinator's status.

    Return the first that exist of: the credentials in --certificate and --ca; those of a coordinator on this
    host; those that a job of this user has kept.

    Raises:
        HolmesError: None of them exist.
    """
    site_credentials = _site_credentials(args)
    if site_credentials is not None:
        return site_credentials
    credentials = status_credentials(host, port, os.environ)
    if credentials is not None:
        return credentials
    raise HolmesError(
        f"holmes join status: this user has no certificate for {address_text(host, port)}; run it on the host"
        " of `holmes join serve`, or where a job of this user has joined, with the same HOST:PORT"
    )


def _log(line: str) -> None:
    """Print a line of the coordinator's log, with the time of day."""
    print_line(f"{time.strftime('%H:%M:%S')} {printable(line, _LONGEST_LINE)}")


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
    status = ask_status(host, port, _status_credentials(args, host, port))
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
