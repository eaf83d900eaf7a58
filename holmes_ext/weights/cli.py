"""Command `holmes weights`: send versions of a model's weights to other sites (data centres).

publish    adds a version to those that `holmes join serve` sends
commit     switches all sites to a version
receive    keeps a folder of a host at a site up to date
status     shows the versions, and the hosts that receive them
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import PORT, JoinPlace, parse_address
from holmes_ext.join.coordinator.client import ask_status, repeat_until_reached
from holmes_ext.join.identity.job_certificate import obtain_certificate, status_credentials
from holmes_ext.join.sockets.handshake import Credentials, printable
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text, listen, split_address
from holmes_ext.units import format_bytes
from holmes_ext.weights.origin import check_origin, fetch_origin
from holmes_ext.weights.publishing import KEEP, publish_folder, store_of_run
from holmes_ext.weights.rate import parse_rate_limit
from holmes_ext.weights.receiver import ReceiverSettings, WeightsReceiver
from holmes_ext.weights.show import progress_bar, show_status
from holmes_ext.weights.store import VersionStore
from holmes_ext.words import counted, print_line, why

_ABOUT = "Send versions of the weights to other sites, each to each site once."
_EPILOG = """\
  holmes join serve                        on the trainer's host
  holmes join invite east --output FILE    there; FILE then goes to a host of site east
  holmes weights receive DIR --join east@HOST:PORT --invitation FILE
                                           on each host of site east, each with an invitation
  holmes weights publish FOLDER --version 1
                                           on the trainer's host, for each version
  holmes weights status                    there

At the sites, DIR/current is the committed version, DIR/NUMBER each staged one.
"""
#: Largest value of --streams: number of connections for pulling a version.
_MOST_STREAMS = 32
#: Largest value of --keep: number of the newest versions that are not removed.
_MOST_KEPT = 1000
#: Number of TCP ports.
_PORTS = 65536
#: Longest time in seconds until `holmes weights receive` has a certificate from `holmes join serve`.
_CERTIFICATE_S = 60.0


def add_parser(subparsers: Any) -> None:
    """Add the command `holmes weights` and its actions to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "weights",
        help="send versions of the weights to other sites",
        description=_ABOUT,
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    publish = actions.add_parser(
        "publish",
        help="publish a folder as a version",
        description="Publish a folder as a version, on the host of `holmes join serve`. Sites get a copy.",
    )
    publish.add_argument("folder", metavar="FOLDER", help="folder with the files of the version")
    publish.add_argument(
        "--version", type=int, required=True, help="number of the version, greater than all before"
    )
    publish.add_argument(
        "--parent",
        type=int,
        help="version to which FOLDER is a delta (default: it is a full version)",
    )
    publish.add_argument(
        "--stage",
        action="store_true",
        help="do not switch to the version before `holmes weights commit` (default: switch when all sites"
        " have it)",
    )
    publish.add_argument(
        "--keep", type=int, default=KEEP, help=f"newest versions that stay (default: {KEEP})"
    )
    commit = actions.add_parser(
        "commit",
        help="switch all sites to a version",
        description="Switch all sites to a version, as soon as all of them have staged it. Run it on the"
        " host of `holmes join serve`.",
    )
    commit.add_argument("version", metavar="VERSION", type=int, help="number of the version")
    for command in (publish, commit):
        command.add_argument(
            "--port", type=int, default=PORT, help=f"port of `holmes join serve` (default: {PORT})"
        )
    _add_receive(actions)
    default_address = f"127.0.0.1:{PORT}"
    status = actions.add_parser(
        "status",
        help="show the versions and the receiving hosts",
        description="Show the versions and the receiving hosts. Run it on the host of `holmes join serve`, or"
        " where a receiving host has joined.",
    )
    status.add_argument(
        "where",
        metavar="HOST:PORT",
        nargs="?",
        default=default_address,
        help=f"address of `holmes join serve` (default: {default_address})",
    )
    status.add_argument("--json", action="store_true", help="print JSON")


def _add_receive(actions: Any) -> None:
    """Add the action `receive` and its options to the parser of `holmes weights`."""
    receive = actions.add_parser(
        "receive",
        help="keep a folder up to date with the published versions",
        description="Keep a folder up to date with the published versions. Of several hosts of a site, one"
        " pulls over the WAN, and the others pull from it.",
    )
    receive.add_argument("folder", metavar="DIR", help="folder in which the versions appear")
    receive.add_argument(
        "--join",
        metavar="SITE@HOST:PORT",
        required=True,
        help="name of this site, and address of `holmes join serve`",
    )
    receive.add_argument(
        "--invitation",
        metavar="FILE",
        default="",
        help="invitation from `holmes join invite SITE`, used at the first start of this host",
    )
    receive.add_argument(
        "--streams",
        type=int,
        default=4,
        help="connections over which a version is pulled (default: 4)",
    )
    receive.add_argument(
        "--rate",
        default="",
        help="rate that pulling over the WAN takes at most, such as 200Mb/s (default: no limit)",
    )
    receive.add_argument(
        "--keep", type=int, default=3, help="newest versions that stay (default: 3)"
    )
    receive.add_argument(
        "--port",
        type=int,
        default=0,
        help="port on which other hosts of the site pull from this one (default: any free one)",
    )
    receive.add_argument(
        "--address",
        metavar="HOST",
        default="",
        help="host that they call (default: the address from which HOST:PORT is reached)",
    )
    receive.add_argument(
        "--once", action="store_true", help="end as soon as the committed version is here"
    )
    receive.add_argument("--json", action="store_true", help="print a JSON line for each event")


def run(args: argparse.Namespace) -> int:
    """Run `holmes weights` with parsed arguments, and return the exit status.

    Raises:
        HolmesError: An argument is not valid, or the command fails.
    """
    match args.action:
        case "publish":
            return _publish(args)
        case "commit":
            return _commit(args)
        case "receive":
            return _receive(args)
    return _status(args)


def _publish(args: argparse.Namespace) -> int:
    _check_number(args, "keep", least=1, most=_MOST_KEPT)
    store = _published_store(args)
    manifest = publish_folder(
        Path(args.folder),
        store,
        args.version,
        parent=args.parent,
        commits=not args.stage,
        keep=args.keep,
    )
    size = format_bytes(manifest.bytes)
    print(
        f"holmes: version {args.version} is published: {counted(len(manifest.files), 'file')}, {size}"
    )
    return 0


def _commit(args: argparse.Namespace) -> int:
    store = _published_store(args)
    if not store.has(args.version):
        published = ", ".join(map(str, store.versions())) or "none"
        raise HolmesError(
            f"holmes weights commit: version {args.version} is not published; published are: {published}"
        )
    store.want(args.version)
    print(f"holmes: version {args.version} is committed as soon as all sites have staged it")
    return 0


def _published_store(args: argparse.Namespace) -> VersionStore:
    """Return the folder from which `holmes join serve` on this host sends versions to the sites."""
    _check_number(args, "port", least=0, most=_PORTS - 1)
    return store_of_run(os.environ, args.port)


def _check_number(args: argparse.Namespace, name: str, least: int, most: int) -> None:
    """Raise HolmesError if the value of the option --NAME is below `least` or above `most`."""
    value = getattr(args, name)
    if not least <= value <= most:
        raise HolmesError(
            f"holmes weights {args.action}: --{name} {value} is not a number from {least} to {most}"
        )


def _receive(args: argparse.Namespace) -> int:
    """Run `holmes weights receive`: keep a folder up to date until the command is interrupted.

    With --once, return as soon as the folder has the committed version.

    Returns:
        Exit status 0.

    Raises:
        HolmesError: An argument is not valid, this site is refused, or the disk is full.
    """
    _check_number(args, "streams", least=1, most=_MOST_STREAMS)
    _check_number(args, "keep", least=1, most=_MOST_KEPT)
    _check_number(args, "port", least=0, most=_PORTS - 1)
    settings = ReceiverSettings(
        streams=args.streams,
        keep=args.keep,
        bits_per_second=parse_rate_limit(args.rate, "--rate") if args.rate else 0.0,
        address=args.address,
        is_once=args.once,
    )
    store = VersionStore(Path(args.folder))
    store.make()
    with store.lock(), suppress(KeyboardInterrupt):
        service = _join_service(args)
        check_origin(store, fetch_origin(service))
        try:
            listening = listen("", args.port)
        except OSError as error:
            raise HolmesError(
                f"holmes weights receive: port {args.port} cannot be listened on ({why(error)}); give"
                " another --port"
            ) from None
        on_event = _print_json_event if args.json else _print_event
        receiver = WeightsReceiver(store, service, listening, settings, on_event)
        with progress_bar(receiver, is_quiet=args.json):
            receiver.run()
    return 0


def _join_service(args: argparse.Namespace) -> JoinPlace:
    """Return the address of `holmes join serve`, and a certificate of this site for connections to it.

    The certificate is that of an earlier start on this host, or is issued for the invitation. Tries for up to
    _CERTIFICATE_S seconds, because `holmes join serve` may be starting.

    Raises:
        HolmesError: The address or the invitation cannot be used, or nothing answers at the address.
    """
    try:
        address = parse_address(args.join)
    except HolmesError as error:
        # Only the first occurrence is the option: later ones may be in the quoted text of the user.
        raise HolmesError(str(error).replace("--holmes-join", "--join", 1)) from None
    deadline = Deadline(_CERTIFICATE_S, "the certificate")
    try:
        certificate = repeat_until_reached(
            lambda: obtain_certificate(address, args.invitation, os.environ, deadline),
            address,
            deadline,
        )
        return JoinPlace(address, certificate.credentials())
    except HolmesError as error:
        raise _with_options_of_receive(error) from None


def _with_options_of_receive(error: HolmesError) -> HolmesError:
    """Return a copy of an error about joining, with the option names of `holmes weights receive` in it.

    The message of `error` names options of a training job: --holmes-join and --holmes-join-invitation.
    """
    message = str(error).replace("--holmes-join-invitation", "--invitation")
    return HolmesError(message.replace("--holmes-join", "--join"))


def _print_json_event(event: dict[str, Any]) -> None:
    """Print an event of a receiving host, such as {"event": "committed", "version": 3}, as a line of JSON."""
    print_line(json.dumps(event))


def _print_event(event: dict[str, Any]) -> None:
    """Print an event of a receiving host as a line for the user, with the time of day."""
    print_line(f"{time.strftime('%H:%M:%S')} {_event_text(event)}")


def _event_text(event: dict[str, Any]) -> str:
    """Return a sentence for the user about an event of a receiving host."""
    match event["event"]:
        case "staged":
            size = format_bytes(event["bytes"])
            return (
                f"version {event['version']} is staged: {size} in {event['seconds']:.1f} s"
                f" from {event['source']}"
            )
        case "committed":
            return f"version {event['version']} is committed"
        case "broken":
            return printable(f"the transfer from {event['source']} broke: {event['reason']}")
    return printable(f"the connection to the service is lost: {event['reason']}")


def _status(args: argparse.Namespace) -> int:
    """Run `holmes weights status`: print the published versions, and a table of the receiving hosts.

    Returns:
        Exit status 0.

    Raises:
        HolmesError: The address cannot be used, or nothing answers there.
    """
    try:
        host, port = split_address(args.where)
    except ValueError:
        raise HolmesError(f"holmes weights status: {args.where!r:.100} is not HOST:PORT") from None
    status = ask_status(host, port, _status_credentials(host, port)).get("weights")
    if not isinstance(status, dict):
        raise HolmesError(
            f"{args.where}: serves no weights; install the same holmes_ext there, and restart it"
        )
    if args.json:
        print(json.dumps(status))
        return 0
    show_status(status)
    return 0


def _status_credentials(host: str, port: int) -> Credentials:
    """Return credentials for reading the status of the `holmes join serve` on HOST:PORT.

    They are those of `holmes join serve` itself if it runs on this host, or else those of a site that has a
    certificate on this host.

    Raises:
        HolmesError: This user has no such credentials.
    """
    credentials = status_credentials(host, port, os.environ)
    if credentials is not None:
        return credentials
    raise HolmesError(
        f"holmes weights status: this user has no certificate for {address_text(host, port)}; run it on the"
        " host of `holmes join serve`, or on a receiving host, with the same HOST:PORT"
    )
