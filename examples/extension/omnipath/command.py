"""Implements the command `holmes omnipath` and the flag --holmes-omnipath-note."""

from holmes_ext.cluster.nic import KINDS


def add_parser(subparsers):
    subparsers.add_parser("omnipath", help="print the latency that holmes assumes for Omni-Path")


def run(args):
    print(f"opa: {1e6 * KINDS['opa'].latency_s:.1f} us")
    return 0


def on_start(session):
    return [f"omnipath: {session.options.value('omnipath_note')}"]
