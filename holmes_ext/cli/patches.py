"""`holmes patches`: what holmes changes inside the frameworks, and whether it fits the installed versions."""

import argparse
import contextlib
import importlib
import json
import sys


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("patches", help="the changes made to the frameworks, and whether they fit what is installed",
                                   description="State: fits, off (with the reason), or unknown (needs --check). "
                                   "Exit status 1 when a framework is installed that a patch does not fit.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="import the frameworks and check the real functions, not their source")


def run(args: argparse.Namespace) -> int:
    from holmes_ext.patches import all_patches

    with contextlib.redirect_stdout(sys.stderr):  # frameworks print while they are imported
        rows = [judge(patch, args.check) for patch in all_patches()]
    if args.json:
        print(json.dumps({"version": 1, "patches": rows}, indent=2))
    else:
        _print_table(rows)
    return 1 if any(row["state"] == "off" and row["installed"] for row in rows) else 0


def judge(patch, check: bool) -> dict:
    """One row: the patch, the installed version and the state. check: import the target's module and look at the target."""
    from holmes_ext.patches.engine.location import Location, Misfit
    from holmes_ext.patches.engine.source import find_module, source_misfit

    feature = patch.feature
    version = feature.installed()
    reason = None if feature.version_of else feature.version_misfit(version)
    state = "off" if reason else "fits"
    if feature.version_of and find_module(patch.module) is None:
        state, reason = "off", f"there is no module {patch.module}"
    elif not reason and check:
        try:
            importlib.import_module(patch.module)
            if feature.version_of:
                version = feature.version_of()
            reason = feature.version_misfit(version)
            if not reason:
                Location(patch).check(patch)
        except Misfit as misfit:
            reason = str(misfit)
        except Exception as error:  # whatever a framework raises while it is imported
            reason = f"{type(error).__name__} while importing {patch.module}: {error}"
        state = "off" if reason else "fits"
    elif not reason:
        reason = source_misfit(patch)
        state = "off" if reason else "unknown" if feature.version_of else "fits"
        if state == "unknown":
            reason = "the version is known only when it is imported: use --check"
    return {"feature": feature.name, "target": patch.target, "versions": feature.versions, "tried": list(feature.tried),
            "asked_by": feature.asked_by, "installed": version, "state": state, "parameters": list(patch.parameters),
            "purpose": patch.reason, "reason": reason}


def _print_table(rows):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        print("holmes has no patches")
        return
    table = Table("feature", "asked for by", "target", "supports", "installed", "state", "why")
    for row in rows:
        cells = (row["feature"], row["asked_by"] or "every job", row["target"], row["versions"], row["installed"] or "-",
                 row["state"], row["reason"] or row["purpose"])
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
