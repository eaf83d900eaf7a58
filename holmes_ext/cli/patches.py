"""Command `holmes patches`: lists the changes to the frameworks and whether they fit.

A patch is a change of holmes to one function of a framework (torch, DeepSpeed, Megatron, Lightning)
while a job runs. A feature is a group of patches that are all applied, or none.
"""

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

#: Columns of the table with one row for each feature, which fits 80 columns.
FEATURES = (
    Column("feature"),
    Column("state"),
    Column("installed", drop=1),
    Column("functions", right=True, drop=3),
    Column("asked for by", drop=4),
    Column("supports", drop=2),
    Column("what it does, or why not", wrap=24),
)
#: Columns of the table with one row for each function (--all).
COLUMNS = (
    Column("feature"),
    Column("asked for by", wrap=16, drop=3),
    Column("target", wrap=18, drop=1),
    Column("supports", wrap=16, drop=2),
    Column("installed", drop=4),
    Column("state"),
    Column("why", wrap=16),
)


def add_parser(subparsers: Any) -> None:
    """Add the command `patches` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "patches",
        help="list the changes to the frameworks, and whether they fit the installed versions",
        description="List the changes of holmes to the installed frameworks. State: fits, off (with the "
        "reason), or unknown (needs --check). Exit status 1 if a patch does not fit an installed framework.",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="print a row for every function, also of frameworks that are not installed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="import the frameworks and check the real functions, not their source",
    )


def run(args: argparse.Namespace) -> int:
    """Print the patches (changes of frameworks' functions), and whether each fits the framework.

    Returns:
        The exit status: 1 if a patch does not fit an installed framework, otherwise 0.
    """
    with contextlib.redirect_stdout(sys.stderr):  # frameworks print while they are imported
        fits = [fit_of(patch, check=args.check) for patch in all_patches()]
    if args.json:
        print(json.dumps({"version": 1, "patches": [_json_of(fit) for fit in fits]}, indent=2))
    elif args.all:
        Screen().table(COLUMNS, [_function_row(fit) for fit in fits])
    else:
        _show_features(fits)
    # "off": the patch does not fit. `installed`: version of the framework; None without it.
    return 1 if any(fit.state == "off" and fit.installed for fit in fits) else 0


def _function_row(fit: Fit) -> tuple[str, ...]:
    """Return the cells of one patched function's row in the table of --all, by COLUMNS.

    The cells are feature, option that asks for it, function, supported and installed version,
    state ("fits", "off", ...), and reason.

    Args:
        fit: The patch of the function, compared with the installed framework.
    """
    feature = fit.patch.feature
    return (
        feature.name,
        feature.switch or "every job",
        fit.patch.target,
        feature.versions,
        fit.installed or "-",
        fit.state,
        fit.reason or fit.patch.reason,
    )


def _show_features(fits: list[Fit]) -> None:
    """Print a table with one row for each feature of an installed framework, and a summary."""
    screen = Screen()
    # Name of a feature -> how each of its functions fits.
    by_feature = grouped((fit.patch.feature.name, fit) for fit in fits)
    installed = []
    not_installed: Counter[str] = Counter()  # package -> number of its features
    for group in by_feature.values():  # the functions of one feature
        # If the framework is not installed, all fits are "off" and have no installed version.
        if any(fit.state != "off" or fit.installed for fit in group):
            installed.append(group)
        else:
            not_installed[group[0].patch.feature.requirement.name] += 1
    if installed:
        screen.table(FEATURES, [_feature_row(group) for group in installed])
    if not_installed:
        counts = ", ".join(f"{name} {count}" for name, count in not_installed.items())
        screen.line(f"not installed here (and their features): {counts}", "dim")
    screen.line(
        f"{len(fits)} functions of {len(by_feature)} features; --all shows each with its reason",
        "dim",
    )
    if any(fit.state == "unknown" for fit in fits):
        screen.line(
            "unknown: the version shows only when the framework is imported; --check does that",
            "dim",
        )


def _feature_row(fits: list[Fit]) -> tuple[str, ...]:
    """Return the row of a feature in the table FEATURES.

    holmes changes all functions of a feature, or none. So the row shows the worst state of its
    functions, with the reason.

    Args:
        fits: How each function of the feature fits the installed framework.
    """
    # "other version": this function needs no patch in the installed version. The feature has that
    # state only if it is the state of all its functions, so it comes last.
    states_from_worst = ("off", "unknown", "fits", "other version")
    worst = min(fits, key=lambda fit: states_from_worst.index(fit.state))
    feature = worst.patch.feature
    state = worst.state
    if state == "other version":  # all patches of the feature are for other releases
        state = "not used"
    description = feature.what
    if state in ("off", "not used") and worst.reason:
        description += f" ({worst.reason})"
    return (
        feature.name,
        state,
        f"{feature.requirement.name} {worst.installed}" if worst.installed else "-",
        str(len(fits)),
        feature.switch or "every job",  # the option that switches the feature on
        feature.versions,
        description,
    )


def _json_of(fit: Fit) -> dict[str, Any]:
    """Return a patch (a change to a framework's function), and how it fits, as values for JSON.

    "purpose" says why the patch is made, "reason" why it does not fit (None if it fits).
    """
    patch = fit.patch
    feature = patch.feature
    return {
        "feature": feature.name,
        "asked_by": feature.switch,  # option that switches the feature on
        "target": patch.target,  # the function
        "versions": feature.versions,  # supported range of the framework
        "tried": list(feature.tried),  # versions in that range that were run with holmes
        "read": list(feature.read),  # further ones; holmes was only compared with their source
        "only": patch.only,  # part of the range that needs this patch
        "installed": fit.installed,
        "state": fit.state,
        "parameters": list(patch.parameters),
        "purpose": patch.reason,
        "what": feature.what,
        "reason": fit.reason,
    }
