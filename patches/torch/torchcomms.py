"""Ends a job that uses torchcomms, because torchcomms would ignore the networks that holmes plans.

torchcomms is a library of communication backends. torch.distributed uses them instead of its own backends if
the library is installed and switched on. The switch is the environment variable
TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 or the setting torch.distributed.config.use_torchcomms.

holmes selects the network of an NCCL process group by the option `net_name`. torch passes the options of a
group to torchcomms as hints with the same names. But the NCCL backend of torchcomms reads the hint "netName".
It ignores "net_name" without a warning, and chooses the network itself.
"""

from __future__ import annotations

import os
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import NICS
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.session import Session

_ENABLING_VARIABLE = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"


@with_session
@by_name
def _refuse_torchcomms(current: Session, call: Call, instance: Any) -> bool:
    """Return False if torch uses its own backends; end the job if it would use torchcomms.

    Runs instead of torch's _use_torchcomms_enabled; `call()` runs the original: it returns whether torchcomms
    is both switched on and installed. torch calls it before it makes a process group.

    Raises:
        HolmesError: torch would use torchcomms.
    """
    uses_torchcomms = call()
    if not uses_torchcomms:
        return False
    if os.environ.get(_ENABLING_VARIABLE):
        switch = f"{_ENABLING_VARIABLE}={os.environ[_ENABLING_VARIABLE]}"
    else:
        switch = "torch.distributed.config.use_torchcomms"

    # Every rank raises this error. told_once() lets one of them print the message.
    raise told_once(
        HolmesError(
            f"{switch}: torchcomms ignores the network that holmes gives to each group; unset it, or run "
            "without --holmes"
        )
    )


PATCHES = (
    Patch(
        NICS,
        "torch.distributed.distributed_c10d:_use_torchcomms_enabled",
        "torchcomms does not read the network in the options of a group",
        _refuse_torchcomms,
        only=">=2.13",
    ),
)
