"""Refuses options of a job that recursive doubling cannot follow."""

from holmes_ext.errors import HolmesError


def on_options(options):
    """Return no lines for the user.

    Raises:
        HolmesError: gradients are to be compressed between clusters.
    """
    if options.compress_gradients != "off":
        raise HolmesError(
            f"--holmes-doubling sends sums as they are, so --holmes-compress-gradients "
            f"{options.compress_gradients} has no effect; leave out one of the two"
        )
    return []
