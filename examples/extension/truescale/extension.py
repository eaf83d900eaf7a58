"""Declares the extension to holmes_ext.

Every job under holmes imports this module, so it imports little itself.
"""

from holmes_ext.extensions import Extension, Option

EXTENSION = Extension(
    name="truescale",
    options=(Option("truescale_note", "TEXT: printed when the job starts"),),
    commands={"truescale": "truescale.command"},
    contributions={"nic_kinds": {"qib": "truescale.nics:TRUE_SCALE"}},
    hooks={"on_start": "truescale.command:on_start"},
    is_active=lambda options: bool(options.value("truescale_note")),
)
