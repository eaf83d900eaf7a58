"""Declares the extension to holmes_ext.

Every job under holmes imports this module, so it imports little itself.
"""

from holmes_ext.extensions import Extension, Option

EXTENSION = Extension(
    name="omnipath",
    options=(Option("omnipath_note", "TEXT: printed when the job starts"),),
    commands={"omnipath": "omnipath.command"},
    contributions={"nic_kinds": {"opa": "omnipath.nics:OMNI_PATH"}},
    hooks={"on_start": "omnipath.command:on_start"},
    is_active=lambda options: bool(options.value("omnipath_note")),
)
