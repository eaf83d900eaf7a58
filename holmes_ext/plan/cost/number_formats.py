"""Number formats in which a GPU can compute: bfloat16 needs a newer GPU than float16.

NVIDIA's GPUs have bfloat16 since Ampere (compute capability 8.0), AMD's since the MI100.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.plan.cost.model import Model

#: Names of GPUs without bfloat16: Kepler to Turing of NVIDIA, and AMD's before the MI100.
_WITHOUT_BFLOAT16 = re.compile(
    r"\b(K[248]0|K80M|M[46]0|P4|P40|P100|V100S?|GV100|T4G?|T40|TITAN|GTX|RTX[ _-]?20\d\d|QUADRO[ _-]RTX"
    r"|MI[256]\d?)\b",
    re.IGNORECASE,
)
#: Characters that separate the words of a name, as in "Tesla_V100-SXM2-16GB".
_SEPARATORS = re.compile(r"[_\-/.]+")


def has_bfloat16(gpu: str) -> bool:
    """Return whether a GPU computes in bfloat16; True for a GPU whose name is not known.

    Args:
        gpu: Name as a driver or scheduler writes it, such as "Tesla V100-SXM2-16GB".
    """
    return _WITHOUT_BFLOAT16.search(_SEPARATORS.sub(" ", gpu)) is None


def lines_about_bfloat16(precision: str, spec: SiteSpec) -> Iterator[str]:
    """Yield a line for the user for each cluster that cannot compute in the job's bfloat16.

    Args:
        precision: "fp32", "fp16" or "bf16"; "" if it is not known.
        spec: The clusters, with the names of their GPUs.
    """
    if precision != "bf16":
        return
    for cluster in spec.clusters:
        if not has_bfloat16(cluster.gpu):
            yield (
                f"not possible: bf16 on gpu {cluster.gpu!r} of cluster {cluster.name}, which has no "
                "bfloat16; use fp16 (--fp16, or fp16 in ds_config)"
            )


def with_number_formats(model: Model, spec: SiteSpec) -> Model:
    """Return the model with the number formats of each cluster's GPUs: whether they have bfloat16.

    The result is in `Gpu.has_bfloat16`, for each cluster of `model.gpus`. For example, it is False for a
    cluster of Tesla V100, and True for a cluster of A100.

    Args:
        model: The model, with the speed and memory of each cluster's GPUs.
        spec: The clusters, with the names of their GPUs.
    """
    gpus = {}
    for cluster in spec.clusters:
        gpu = model.gpu_of(cluster.name)
        gpus[cluster.name] = replace(gpu, has_bfloat16=has_bfloat16(cluster.gpu))
    return replace(model, gpus=gpus)
