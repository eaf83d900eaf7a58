"""Declares the extension to holmes_ext.

Every job under holmes imports this module, so it imports little itself.
"""

from holmes_ext.extensions import Extension, Option

EXTENSION = Extension(
    name="doubling",
    options=(
        Option(
            "doubling",
            "on: hierarchical sums of gradients cross clusters by recursive doubling (gloo only)",
            default="off",
            choices=("off", "on"),
            bare_value="on",
        ),
    ),
    contributions={"reductions": {"doubling": "doubling.reduction:doubling_for"}},
    hooks={"on_options": "doubling.options:on_options"},
    is_active=lambda options: options.value("doubling") == "on",
)
