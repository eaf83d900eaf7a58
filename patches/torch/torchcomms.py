"""Ends a job that uses torchcomms, because the networks of its process groups would be lost.

torchcomms is a library that torch.distributed can use in place of its own backends, if the environment
variable TORCH_DISTRIBUTED_USE_TORCHCOMMS is 1. torch then converts the options of a group to hints. holmes
sets the network of a group as the option `net_name`, which becomes the hint "net_name". The NCCL of
torchcomms reads the hint "netName", so it would ignore the network without a message.
"""

from __future__ import annotations

import os

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import NICS
from holmes_ext.runtime.start.refusal import told_once

_VARIABLE = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"


@with_session
@by_name
def _refuse_torchcomms(current, call, instance):
    """Return False: torchcomms is not used. If it would be used, the job ends with a message.

    Wrapper of torch's _use_torchcomms_enabled, which `call()` runs. torch calls it before it makes a process
    group. It returns whether torchcomms is switched on and installed.

    Raises:
        HolmesError: torchcomms would be used.
    """
    if not call():
        return False
    if os.environ.get(_VARIABLE):
        switch = f"{_VARIABLE}={os.environ[_VARIABLE]}"
    else:
        switch = "torch.distributed.config.use_torchcomms"
    raise told_once(
        HolmesError(
            f"{switch}: torchcomms ignores the network that holmes gives to each group; unset it, or run "
            "without --holmes"
        )
    )


PATCHES = (
    Patch(NICS, "torch.distributed.distributed_c10d:_use_torchcomms_enabled",
          "torchcomms does not read the network in the options of a group", _refuse_torchcomms,
          only=">=2.13"),
)  # fmt: skip
