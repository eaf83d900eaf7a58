"""Defines the NIC kind "opa" (Omni-Path) of cluster.toml."""

from holmes_ext.cluster.nic import NicKind

OMNI_PATH = NicKind(
    latency_s=1e-6, words=("opa", "omnipath"), layer="InfiniBand", color="#6a4c93", driver="hfi1"
)
