"""`holmes patches`: what holmes changes inside the frameworks, and whether it fits the installed versions."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.doctor.frameworks import Fit, fit_of
from holmes_ext.patches import all_patches
from holmes_ext.words import grouped

#: One row a feature; readable on 80 columns.
FEATURES = (
    Column("feature"),
    Column("state"),
    Column("installed", drop=1),
    Column("functions", right=True, drop=3),
    Column("asked for by", drop=4),
    Column("supports", drop=2),
    Column("what it does, or why not", wrap=24),
)
#: One row a function, of --all.
COLUMNS = (
    Column("feature"),
    Column("asked for by", wrap=16, drop=3),
    Column("target", wrap=18, drop=1),
    Column("supports", wrap=16, drop=2),
    Column("installed"),
    Column("state"),
    Column("why", wrap=24),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "patches",
        help="the changes made to the frameworks, and whether they fit what is installed",
        description="Lists what holmes changes in the frameworks that are installed. State: fits, off (with "
        "the reason), or unknown (needs --check). Exit status 1 when a framework is installed that a patch "
        "does not fit.",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="a row for every function, of frameworks that are not installed, too",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="import the frameworks and check the real functions, not their source",
    )


def run(args: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # frameworks print while they are imported
        fits = [fit_of(patch, args.check) for patch in all_patches()]
    if args.json:
        print(json.dumps({"version": 1, "patches": [_document(fit) for fit in fits]}, indent=2))
    elif args.all:
        Screen().table(
            COLUMNS,
            [
                (
                    fit.patch.feature.name,
                    fit.patch.feature.asked_by or "every job",
                    fit.patch.target,
                    fit.patch.feature.versions,
                    fit.installed or "-",
                    fit.state,
                    fit.reason or fit.patch.reason,
                )
                for fit in fits
            ],
        )
    else:
        screen, by_feature = Screen(), grouped((fit.patch.feature.name, fit) for fit in fits)
        here = [
            group
            for group in by_feature.values()
            if any(fit.state != "off" or fit.installed for fit in group)
        ]
        if here:
            screen.table(FEATURES, [_feature(group) for group in here])
        if absent := Counter(
            group[0].patch.feature.requirement.name
            for group in by_feature.values()
            if group not in here
        ):
            named = ", ".join(f"{name} {count}" for name, count in absent.items())
            screen.line(f"not installed here (and their features): {named}", "dim")
        screen.line(
            f"{len(fits)} functions of {len(by_feature)} features; --all shows each with its reason",
            "dim",
        )
        if any(fit.state == "unknown" for fit in fits):
            screen.line(
                "unknown: the version shows only when the framework is imported; --check does that",
                "dim",
            )
    return 1 if any(fit.state == "off" and fit.installed for fit in fits) else 0


def _feature(fits: list[Fit]) -> tuple[str, ...]:
    """Return the row of a feature in the table FEATURES.

    holmes changes all functions of a feature, or none. So the row shows the state of the function
    that fits worst, with the reason.

    Args:
        fits: How each function of the feature fits the installed framework.
    """
    worst = min(fits, key=lambda fit: ("off", "unknown", "fits", "other version").index(fit.state))
    feature = worst.patch.feature
    state = worst.state
    reason = worst.reason if state == "off" else ""
    if (
        state == "other version"
    ):  # all patches of the feature are for other releases of the framework
        state = "not used"
        reason = worst.reason
    package = f"{feature.requirement.name} {worst.installed}" if worst.installed else "-"
    what = feature.what + (f" ({reason})" if reason else "")
    return (
        feature.name,
        state,
        package,
        str(len(fits)),
        feature.asked_by or "every job",
        feature.versions,
        what,
    )


def _document(fit: Fit) -> dict[str, Any]:
    patch, feature = fit.patch, fit.patch.feature
    return {
        "feature": feature.name,
        "asked_by": feature.asked_by,
        "target": patch.target,
        "versions": feature.versions,
        "tried": list(feature.tried),
        "read": list(feature.read),
        "only": patch.only,
        "installed": fit.installed,
        "state": fit.state,
        "parameters": list(patch.parameters),
        "purpose": patch.reason,
        "what": feature.what,
        "reason": fit.reason,
    }
