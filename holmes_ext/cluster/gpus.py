"""Speed, memory and intra-node links of GPU models, found by the name that a driver or a label gives.

    "NVIDIA-A100-SXM4-40GB"   model A100, memory 40 GB instead of the 80 GB of most A100
    "H100 NVL"                form NVL of the H100: 94 GB, less power, NVLink between two cards only
    "A100_3g.20gb"            MIG slice of an A100: no known model, because NCCL cannot join slices

Memory and links come from the vendors' data sheets. The FLOP/s are those that the kernels of a
training step are assumed to reach, without waiting for communication or for other pipeline stages:

    Ampere A100     180 TFLOP/s, 58 % of the peak of 312: with it, 30 published runs on A100 are predicted
                    within 25 %, with pipelines of 1 to 64 stages (docs/benchmarks/prediction.md). The
                    140 to 163 TFLOP/s of Narayanan et al. 2021 (arXiv 2104.04473, table 1) are figures
                    of whole steps, with bubbles and communication: gpu_hardware_flops
    other models    40 % of the peak for dense matrices in bfloat16, in float16 for models without
                    bfloat16; on Hopper: 400 of 989

Measured values give better predictions: see gpu_flops in docs/clusters.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Accelerator:
    """Speed and memory of one GPU. A value of 0 is unknown."""

    flops: float = 0.0  # FLOP/s of the kernels of a training step
    memory_bytes: float = 0.0
    link_bps: float = 0.0  # bits/s to the other GPUs of the node, each way
    #: FLOP/s of whole training steps, waits included: the FLOPs of a step / GPUs / seconds of the step.
    #: model_flops leaves recomputed activations out (MFU); hardware_flops counts them, too (HFU).
    model_flops: float = 0.0
    hardware_flops: float = 0.0

    @property
    def any_flops(self) -> float:
        """FLOP/s of kernels if known, otherwise the lower FLOP/s of whole steps; 0 if both are unknown."""
        return self.flops or self.hardware_flops or self.model_flops


#: Part of the dense 16-bit peak that the kernels of a training step are assumed to reach.
_REACHED = 0.4


def _from_sheet(peak_tflops: float, memory_gb: float, link_gbytes: float = 0.0) -> Accelerator:
    """Return an accelerator from the numbers of a data sheet.

    A training step's kernels do not reach the sheet's peak: `flops` is the part _REACHED of it. A sheet
    with 181 TFLOP/s gives 72e12 FLOP/s.

    Args:
        peak_tflops: Peak dense 16-bit TFLOP/s. Many sheets give those with sparsity, twice as many.
        memory_gb: Memory in units of 10^9 bytes.
        link_gbytes: Gigabytes/s to the other GPUs of the node, each way. Sheets give both ways
            together, twice as many. 0: the GPUs of a node communicate over PCIe.
    """
    return Accelerator(
        flops=round(peak_tflops * _REACHED) * 1e12,
        memory_bytes=memory_gb * 1e9,
        link_bps=link_gbytes * 8e9,
    )


#: GPU model -> its numbers, in the form with the fastest link (SXM, OAM). The longer forms below
#: differ: "H100 PCIe" is slower than "H100". Cards with a bridge between two GPUs count as
#: without link, because the bridge does not connect all GPUs of a node.
KNOWN_GPUS = {
    "A100": Accelerator(flops=180e12, memory_bytes=80e9, link_bps=2400e9),
    "A800": Accelerator(flops=180e12, memory_bytes=80e9, link_bps=1600e9),
    "H100": Accelerator(flops=400e12, memory_bytes=80e9, link_bps=3600e9),
    "H800": Accelerator(flops=400e12, memory_bytes=80e9, link_bps=1600e9),
    "H200": Accelerator(flops=400e12, memory_bytes=141e9, link_bps=3600e9),
    # Hopper and Blackwell
    "H20": _from_sheet(148, memory_gb=96, link_gbytes=450),
    "GH200": _from_sheet(989, memory_gb=96, link_gbytes=450),
    "B100": _from_sheet(1750, memory_gb=180, link_gbytes=900),
    "B200": _from_sheet(2250, memory_gb=180, link_gbytes=900),
    "B300": _from_sheet(2250, memory_gb=288, link_gbytes=900),
    "GB200": _from_sheet(2500, memory_gb=186, link_gbytes=900),
    "GB300": _from_sheet(2500, memory_gb=288, link_gbytes=900),
    # Data center cards without NVLink between all GPUs
    "A30": _from_sheet(165, memory_gb=24),
    "A40": _from_sheet(150, memory_gb=48),
    "A10": _from_sheet(125, memory_gb=24),
    "A10G": _from_sheet(70, memory_gb=24),
    "L4": _from_sheet(121, memory_gb=24),
    "L20": _from_sheet(119.5, memory_gb=48),
    "L40": _from_sheet(181, memory_gb=48),
    "L40S": _from_sheet(362, memory_gb=48),
    # Before Ampere: float16
    "V100": _from_sheet(125, memory_gb=16, link_gbytes=150),
    "V100S": _from_sheet(130, memory_gb=32),
    "T4": _from_sheet(65, memory_gb=16),
    # Workstations
    "RTX 3090": _from_sheet(71, memory_gb=24),
    "RTX 4090": _from_sheet(165, memory_gb=24),
    "RTX 5090": _from_sheet(209.5, memory_gb=32),
    "RTX A5000": _from_sheet(111, memory_gb=24),
    "RTX A6000": _from_sheet(155, memory_gb=48),
    "RTX 6000 Ada": _from_sheet(364, memory_gb=48),
    "RTX PRO 6000": _from_sheet(503, memory_gb=96),
    # GPUs of AMD. Each of the two dies of a MI250X counts as a GPU.
    "MI210": _from_sheet(181, memory_gb=64),
    "MI250": _from_sheet(181, memory_gb=64, link_gbytes=50),
    "MI250X": _from_sheet(191.5, memory_gb=64, link_gbytes=50),
    "MI300A": _from_sheet(980, memory_gb=128, link_gbytes=192),
    "MI300X": _from_sheet(1307, memory_gb=192, link_gbytes=448),
    "MI308X": _from_sheet(188, memory_gb=192, link_gbytes=448),
    "MI325X": _from_sheet(1307, memory_gb=256, link_gbytes=448),
    "MI350X": _from_sheet(2300, memory_gb=288, link_gbytes=537.6),
    "MI355X": _from_sheet(2500, memory_gb=288, link_gbytes=537.6),
}
#: (model, form) -> numbers of a form that differs from the model's main form by more than its link.
#: A form is a word of the name, in upper case.
_FORMS = {
    ("A800", "ACTIVE"): _from_sheet(312, memory_gb=40),
    ("H100", "PCIE"): _from_sheet(756, memory_gb=80),
    ("H800", "PCIE"): _from_sheet(756, memory_gb=80),
    ("H100", "NVL"): _from_sheet(835, memory_gb=94),
    ("H200", "NVL"): _from_sheet(835, memory_gb=141),
    ("V100", "PCIE"): _from_sheet(112, memory_gb=16),
    ("H20", "3E"): _from_sheet(148, memory_gb=141, link_gbytes=450),
}
#: Forms of cards in PCIe slots. Their GPUs have no NVLink to all other GPUs of the node.
_CARD_FORMS = ("PCIE", "NVL", "ACTIVE")
#: Spellings of models that people and schedulers use -> the model.
_ALIASES = {
    "A6000": "RTX A6000",
    "A5000": "RTX A5000",
    "RTX3090": "RTX 3090",
    "RTX4090": "RTX 4090",
    "RTX5090": "RTX 5090",
    "RTXA5000": "RTX A5000",
    "RTXA6000": "RTX A6000",
    "RTX6000ADA": "RTX 6000 Ada",
}
_WORD = re.compile(r"[A-Z0-9]+")
#: Memory in a name: "40GB", "80 GB", "144G". Not "3g.20gb": that is a slice (_SLICE).
_MEMORY = re.compile(r"(?<![A-Z0-9])(\d{2,3}) ?G[BI]?(?![A-Z0-9])")
#: Memory at the end of a name that a site gave: "h100-96", "v100_32".
_MEMORY_AT_END = re.compile(r"(?<=[A-Z0-9])[-_](\d{2,3})$")
#: Slice of a GPU (MIG): "1g.5gb", "MIG 3g.20gb", "mig-1g.10gb".
_SLICE = re.compile(r"(?<![A-Z0-9])(MIG|\d+[CG]\.\d+GB)(?![A-Z0-9])")
#: Smallest memory of the CPU of a Grace superchip, in GB; larger than that of any GPU.
_SMALLEST_CPU_GB = 400
_LETTERS_LIKE_DIGITS = str.maketrans({"O": "0", "I": "1", "L": "1", "Z": "2", " ": "", "-": ""})
_VENDOR = re.compile(r"^(NVIDIA|AMD|TESLA|GEFORCE|QUADRO|INSTINCT)[-_ ]+", re.IGNORECASE)


def accelerator_of(name: str) -> Accelerator | None:
    """Return the speed, memory and link rate of a GPU by its name, None for an unknown model.

    A memory size in the name replaces that of the model. A card in a PCIe slot has no link to all
    GPUs of its node: 0 bits/s. A slice of a GPU (MIG) is no known model.

    Args:
        name: Name as a driver, label or scheduler writes it, such as "NVIDIA A100-SXM4-40GB",
            "NVIDIA-H100-NVL" or "gh200".
    """
    upper = _spaced(name)
    if _SLICE.search(upper):
        return None
    model = _model_in(upper)
    if not model:
        return None
    accelerator = KNOWN_GPUS[model]
    for word in _WORD.findall(upper):
        # A form may have other numbers (_FORMS), lack the link (_CARD_FORMS), or both, as "H100 NVL".
        accelerator = _FORMS.get((model, word), accelerator)
        if word in _CARD_FORMS:
            accelerator = replace(accelerator, link_bps=0.0)
    memory = _MEMORY.search(upper.replace("_", "-")) or _MEMORY_AT_END.search(upper)
    if memory and not _is_memory_of_cpu(model, memory[1]):
        accelerator = replace(accelerator, memory_bytes=float(memory[1]) * 1e9)
    return accelerator


def _spaced(name: str) -> str:
    """Return a name in upper case, with a dash between model and form (NVL, PCIe, SXM).

    Some names join the two: "H100NVL" gives "H100-NVL", so that "H100" is a word of its own.
    """
    return re.sub(r"(?<=\d)(?=NVL\b|PCIE\b|SXM\d?\b)", "-", name.upper())


def _is_memory_of_cpu(model: str, gigabytes: str) -> bool:
    """Return whether the memory in a GPU's name is that of the CPU beside the GPU.

    A Grace superchip (GH200, GB200, ...) joins a GPU and a CPU with memory of its own. Its name gives the
    memory of the CPU: a "GH200 480GB" has 480 GB beside the CPU, and 96 GB on the GPU.
    """
    return model.startswith("G") and int(gigabytes) >= _SMALLEST_CPU_GB


def _model_in(upper_name: str) -> str:
    """Return the known model in a name in upper case, "" if there is none.

    The longest model counts: "RTX 6000 Ada" before "RTX 6000". A model is a whole word, so "L4" is
    not in "L40S".
    """
    words = _WORD.findall(upper_name)
    joined = f" {' '.join(words)} "
    found = [model for model in KNOWN_GPUS if f" {model.upper()} " in joined]
    found += [model for alias, model in _ALIASES.items() if f" {alias} " in joined]
    return max(found, key=len, default="")


def gpu_name(text: str) -> str:
    """Return a short name for which accelerator_of() has the same speed, memory and link rate.

    That is the model, if a GPU of this name has the values of the usual GPU of the model. Otherwise
    it is the name without the vendor:

        "NVIDIA-H100-80GB-HBM3"    "H100"
        "NVIDIA-A100-SXM4-40GB"    "A100-SXM4-40GB", because the usual A100 has 80 GB
        "NVIDIA-H100-NVL"          "H100-NVL"
        "tesla_p100"               "tesla_p100", an unknown model: the name does not change
    """
    accelerator = accelerator_of(text)
    if accelerator is None:
        return text
    model = _model_in(_spaced(text))
    usual_gpu_of_model = KNOWN_GPUS[model]
    if accelerator == usual_gpu_of_model:
        return model
    name = text
    while _VENDOR.match(name):
        name = _VENDOR.sub("", name)
    return name


def misspelt_model(name: str) -> str:
    """Return the known model that a name means if letters in it stand for digits, otherwise "".

    "A10O" means "A100", because the letter O stands for the digit 0. "B20" gives "": the most similar
    model, B200, has another digit, and may be another GPU than the user means.
    """
    digits = name.upper().translate(_LETTERS_LIKE_DIGITS)
    models = {model.upper().translate(_LETTERS_LIKE_DIGITS): model for model in KNOWN_GPUS}
    return models.get(digits, "")


def names_one_model(texts: list[str]) -> str:
    """Return the GPU model that words such as a node's features name, "" for none or several models.

    The features "ib", "hdr" and "a100-80gb" give "A100".
    """
    names = {gpu_name(text) for text in texts if accelerator_of(text) is not None}
    return names.pop() if len(names) == 1 else ""
