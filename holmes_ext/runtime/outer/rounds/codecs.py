"""What travels between jobs: pseudo-gradients in fewer bytes.

bf16, int8      as between the levels of a reduction (runtime/reduce/compress.py)
"""

from __future__ import annotations

import torch

from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.reduce.compress import Codec as OuterCodec
from holmes_ext.runtime.reduce.compress import codec


def codec_of(settings: OuterSettings) -> OuterCodec:
    return codec(settings.compress)


def residual_dtype(settings: OuterSettings) -> torch.dtype | None:
    """Of what the codec leaves out and adds the next time; None where it keeps nothing."""
    return torch.bfloat16 if settings.compress == "int8" else None
