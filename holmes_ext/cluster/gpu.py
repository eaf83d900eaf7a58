"""What a GPU does for training: known names, and what cluster.toml says instead.

    [[cluster]]
    gpu = "A100"                 # a name of KNOWN gives all three numbers, as in "NVIDIA A100-SXM4-40GB", too
    gpu_flops = 150e12           # FLOP/s that training reaches on one GPU (not the data sheet's peak)
    gpu_memory_bytes = 80e9
    nvlink = "2400Gb/s"          # of one GPU, each way, to the others of its node

Peaks, memory and NVLink are the data sheets'. What training reaches is an assumption: 150 TFLOP/s on Ampere
(48 % of 312; Narayanan et al. 2021, arXiv 2104.04473, table 1, measure 140 to 163), 400 TFLOP/s on Hopper (40
% of 989). Measure yours and write it down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Accelerator:
    """flops: FLOP/s reached in training; link_bps: bits/s of one GPU to others of its node. 0: not known."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    link_bps: float = 0.0


KNOWN = {
    "A100": Accelerator(150e12, 80e9, 2400e9),
    "A800": Accelerator(150e12, 80e9, 1600e9),
    "H100": Accelerator(400e12, 80e9, 3600e9),
    "H800": Accelerator(400e12, 80e9, 1600e9),
    "H200": Accelerator(400e12, 141e9, 3600e9),
}
_MEMORY = re.compile(r"(\d+) ?GB", re.IGNORECASE)


def accelerator_of(name: str) -> Accelerator | None:
    """The known GPU that is a word of `name` ("NVIDIA A100-SXM4-40GB"), with the memory that the name states,
    without NVLink if it says PCIe. None where no word is known."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    accelerator = next((KNOWN[word] for word in words if word in KNOWN), None)
    if accelerator is None:
        return None
    if stated := _MEMORY.search(name):
        accelerator = replace(accelerator, memory_bytes=float(stated[1]) * 1e9)
    return replace(accelerator, link_bps=0.0) if "PCIE" in words else accelerator
