"""Tests `holmes doctor` on four emulated nodes, one of which has a wrong NCCL_IB_HCA.

The report compares the findings of all nodes and names the node that differs.
"""

from carriers import ON_GPUS

from integration_tests.jobs import over_nccl

SCRIPT = """
import os, socket, sys
from holmes_ext.cli.main import main
if socket.gethostname() == "b1":
    os.environ["NCCL_IB_HCA"] = "mlx5_7"
sys.exit(main(["doctor", "--cluster", sys.argv[1]]))
"""


@over_nccl
def test_each_nodes_findings_stand_side_by_side(two_clusters, tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text(SCRIPT)
    # For a command without --holmes, the lab sets the NCCL variables that a user without holmes would set.
    env = {"NCCL_IB_DISABLE": "0"} if ON_GPUS else {}
    result = two_clusters.run(str(script), str(two_clusters.file), timeout=300, env=env)
    output = result.stdout[0]
    assert sorted(result.statuses.values()) == [0, 0, 0, 1], result.outputs
    assert (
        "problem: b1: NCCL_IB_HCA: 'mlx5_7' names mlx5_7" in output
        and "(its HCAs: mlx5_0:1)" in output
    )
    assert (
        "NCCL_IB_HCA: unset on most, but b1 mlx5_7" in output
        and "4 nodes" in output
        and "1 problem" in output
    ), output
    assert not any(result.stdout[rank] for rank in (1, 2, 3))
