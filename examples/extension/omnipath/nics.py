"""The NIC kind: what `kind = "opa"` in cluster.toml means."""

from holmes_ext.cluster.nic import NicKind

OMNI_PATH = NicKind(
    latency_s=1e-6, words=("opa", "omnipath"), layer="InfiniBand", color="#6a4c93", driver="hfi1"
)
