"""Implements the command `holmes truescale` and the flag --holmes-truescale-note."""

from holmes_ext.cluster.nic import KINDS


def add_parser(subparsers):
    subparsers.add_parser("truescale", help="print the latency that holmes assumes for True Scale")


def run(args):
    print(f"qib: {1e6 * KINDS['qib'].latency_s:.1f} us")
    return 0


def on_start(session):
    return [f"truescale: {session.options.value('truescale_note')}"]
