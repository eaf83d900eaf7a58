"""Defines the NIC kind "qib" (True Scale, InfiniBand adapters of QLogic and Intel) of cluster.toml."""

from holmes_ext.cluster.nic import NicKind

TRUE_SCALE = NicKind(
    latency_s=1e-6, words=("qib", "truescale"), layer="InfiniBand", color="#6d6875", driver="ib_qib"
)
