"""Gives Lightning the node number that the plan assigned to this process.

Under a plan, ranks are renumbered. How Lightning learns the rank of a process depends on the launcher:

    torchrun, srun         from RANK or SLURM_PROCID, which holmes has renumbered already
    any other launcher     LightningEnvironment: node_rank() x processes per node + LOCAL_RANK, patched here
"""

from __future__ import annotations

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.lightning.features import RANKS


@with_session
@by_name
def _planned_node(current, call, instance):
    """Return the planned number of this process's node as LightningEnvironment.node_rank().

    In a process without a launcher the world size is 1: Lightning starts the other processes itself, later.
    """
    if current.plan.world_size == 1:
        return call()
    call.refuse_unread_arguments()
    return current.rank // current.plan.processes


PATCHES = (
    Patch(RANKS, "lightning.fabric.plugins.environments.lightning:LightningEnvironment.node_rank",
          "NODE_RANK is the machine's, and stays; the rank that Lightning makes of it must be the renumbered "
          "one", _planned_node),
)  # fmt: skip
