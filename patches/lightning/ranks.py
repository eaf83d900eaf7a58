"""Makes Lightning number the nodes, and so the ranks, in the order of holmes's plan.

holmes may renumber the ranks of a job before the training script runs. Lightning gets the rank of a process
in one of two ways, depending on the launcher:

    torchrun, srun     It reads RANK or SLURM_PROCID. holmes has changed these already.
    other launchers    LightningEnvironment computes node_rank() x processes per node + LOCAL_RANK. Here
                       node_rank() is replaced, so that it returns the planned number of the node.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.lightning.features import RANKS
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.session import Session


@with_session
@by_name
def _planned_node(current: Session, call: Call, instance: Any) -> int:
    """Return the number of this process's node in holmes's plan, in place of Lightning's number.

    Runs instead of LightningEnvironment.node_rank; `call()` runs the original.

    Without a launcher, the plan's world size is 1, because Lightning starts the other processes later. Then
    Lightning's own number is returned.

    Raises:
        HolmesError: Nodes have different numbers of processes.
    """
    if current.plan.world_size == 1:
        return call()
    # Raises an error if a later Lightning passes an argument: this wrapper reads none.
    call.refuse_unread_arguments()
    if current.plan.processes_of:
        # All ranks get here, and told_once() prints the error on one of them.
        raise told_once(
            HolmesError(
                f"Lightning needs equally many processes on every node ({current.plan.widths_text()}): it "
                "divides ranks by their number; start a job on nodes of one width"
            )
        )
    return current.rank // current.plan.processes


PATCHES = (
    Patch(
        RANKS,
        "lightning.fabric.plugins.environments.lightning:LightningEnvironment.node_rank",
        "Lightning computes the rank from the number of the node, which holmes may have changed",
        _planned_node,
    ),
)
