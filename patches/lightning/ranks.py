"""Lightning works a process's rank out from its node's number, which under a plan is the planned one.

    torchrun, srun         Lightning reads RANK or SLURM_PROCID, which are renumbered already
    any other launcher     LightningEnvironment: node_rank() x processes of a node + LOCAL_RANK
"""

from __future__ import annotations

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.lightning.features import RANKS


@with_session
@by_name
def _planned_node(current, call, instance):
    """node_rank() of a process that a launcher gave a rank; Lightning's own children have none yet."""
    if current.plan.world_size == 1:
        return call()
    call.refuse_unknown()
    return current.rank // current.plan.processes


PATCHES = (
    Patch(RANKS, "lightning.fabric.plugins.environments.lightning:LightningEnvironment.node_rank",
          "NODE_RANK is the machine's, and stays; the rank that Lightning makes of it must be the renumbered "
          "one", _planned_node),
)  # fmt: skip
