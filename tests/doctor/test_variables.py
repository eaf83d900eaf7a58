"""doctor/variables.py: environment variables that contradict the node's NICs."""

from dataclasses import replace

import pytest
from nics import ETHERNET, IB, ROCE, V2

from holmes_ext.doctor.variables import check_variables, settings


@pytest.mark.parametrize(
    "environ, level, words",
    [
        ({"GLOO_SOCKET_IFNAME": "ens9"}, "problem", "names ens9, which this node does not have"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "note", "every gloo group uses it"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "problem", "names eth"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "note", "holmes keeps your setting"),
        ({"NCCL_IB_HCA": "=mlx5_0,mlx5_7"}, "problem", "names mlx5_7"),
        ({"NCCL_IB_HCA": "mlx5_0"}, "note", "holmes keeps your setting"),
        ({"NCCL_IB_HCA": "mlx5_2:1"}, "problem", "mlx5_2:1, which is down"),
        ({"NCCL_IB_GID_INDEX": "0"}, "problem", "entry 0 is no RoCE v2 GID of mlx5_1:1 (roce_v1)"),
        ({"NCCL_IB_GID_INDEX": "x"}, "problem", "is no number"),
        ({"NCCL_IB_DISABLE": "1"}, "problem", "every NCCL group goes over TCP sockets"),
        ({"NCCL_NET": "Socket"}, "note", "overrides the network of every group"),
        ({"NCCL_COMM_SPLIT_SHARE_RESOURCES": "1"}, "note", "has its network too"),
        ({"NCCL_ALLNET_ENABLE": "1"}, "note", "NVIDIA/nccl#1659"),
        ({"HOLMES_CLUSTR": "x"}, "problem", "write HOLMES_CLUSTER"),
    ],
)
def test_each_finding(environ, level, words):
    roce = replace(ROCE, gids=(replace(V2, index=0, type="roce_v1"), V2))
    nics = [IB, roce, replace(IB, device="mlx5_2", state="down", state_text="DOWN"), ETHERNET]
    (finding,) = check_variables(environ, nics)
    assert finding.level == level and words in f"{finding.what}; {finding.why}; {finding.mend}"


def test_what_is_right_or_not_ours_has_no_finding():
    environ = {
        "NCCL_IB_HCA": "^mlx5_9",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_IB_DISABLE": "0",
        "HOLMES": "1",
        "HOLMES_LAB_CLUSTER": "x",
        "PATH": "/bin",
        "HOLMES_GPU_WATCH": "/tmp",
        "HOLMES_NCCL_SOURCE": "x",
    }
    assert list(check_variables(environ, [ROCE, ETHERNET])) == []
    assert settings({**environ, "NCCL_DEBUG": "INFO"}) == {
        k: environ[k] for k in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE", "HOLMES")
    }
