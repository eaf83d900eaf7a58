"""Names of GPUs as drivers, labels and schedulers write them: which model, memory and link they stand for."""

import pytest

from holmes_ext.cluster.gpus import KNOWN_GPUS, accelerator_of, gpu_name, names_one_model

#: Name -> short name, memory in GB, bits/s to the other GPUs of the node.
NAMES = {
    "NVIDIA-A100-SXM4-40GB": ("A100-SXM4-40GB", 40, 2400e9),
    "NVIDIA-A100-SXM4-80GB": ("A100", 80, 2400e9),
    "NVIDIA A100-PCIE-40GB": ("A100-PCIE-40GB", 40, 0),
    "NVIDIA-A100-80GB-PCIe": ("A100-80GB-PCIe", 80, 0),
    "nvidia_a100-sxm4-80gb": ("A100", 80, 2400e9),
    "a100-40g": ("a100-40g", 40, 2400e9),
    "A100_PCIE_40GB": ("A100_PCIE_40GB", 40, 0),
    "NVIDIA-A800-SXM4-80GB": ("A800", 80, 1600e9),
    "NVIDIA-H100-80GB-HBM3": ("H100", 80, 3600e9),
    "nvidia-h100-mega-80gb": ("H100", 80, 3600e9),
    "NVIDIA-H100-PCIe": ("H100-PCIe", 80, 0),
    "NVIDIA-H100-NVL": ("H100-NVL", 94, 0),
    "NVIDIA-H200-NVL": ("H200-NVL", 141, 0),
    "NVIDIA-H20": ("H20", 96, 3600e9),
    "NVIDIA-H20-3e": ("H20-3e", 141, 3600e9),
    "NVIDIA-H800": ("H800", 80, 1600e9),
    "NVIDIA-GH200-480GB": ("GH200", 96, 3600e9),  # 480 GB are the CPU's
    "NVIDIA-GH200-144G-HBM3e": ("GH200-144G-HBM3e", 144, 3600e9),
    "NVIDIA-B200": ("B200", 180, 7200e9),
    "NVIDIA-B300-SXM6-AC": ("B300", 288, 7200e9),
    "NVIDIA-GB200": ("GB200", 186, 7200e9),
    "NVIDIA-GB300": ("GB300", 288, 7200e9),
    "NVIDIA-L40S": ("L40S", 48, 0),
    "NVIDIA-L40": ("L40", 48, 0),
    "NVIDIA-L4": ("L4", 24, 0),
    "NVIDIA-A10G-SHARED": ("A10G", 24, 0),
    "NVIDIA RTX A6000": ("RTX A6000", 48, 0),
    "NVIDIA-RTX-6000-Ada-Generation": ("RTX 6000 Ada", 48, 0),
    "NVIDIA-GeForce-RTX-4090": ("RTX 4090", 24, 0),
    "rtx4090": ("RTX 4090", 24, 0),
    "Tesla-V100-SXM2-32GB": ("V100-SXM2-32GB", 32, 1200e9),
    "Tesla-V100-PCIE-16GB": ("V100-PCIE-16GB", 16, 0),
    "Tesla-T4": ("T4", 16, 0),
    "AMD_Instinct_MI300X_OAM": ("MI300X", 192, 3584e9),
    "AMD Instinct MI325X": ("MI325X", 256, 3584e9),
    "MI355X": ("MI355X", 288, 4300.8e9),
    "AMD Instinct MI250X / MI250": ("MI250X", 64, 400e9),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_keeps_its_memory_and_form(name):
    short, memory_gb, link_bps = NAMES[name]
    accelerator = accelerator_of(name)
    assert gpu_name(name) == short
    assert accelerator.memory_bytes == pytest.approx(memory_gb * 1e9)
    assert accelerator.link_bps == pytest.approx(link_bps)
    assert accelerator_of(short) == accelerator, "the short name says the same"


@pytest.mark.parametrize(
    "name",
    [
        "a100_3g.20gb",
        "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
        "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb",
        "tesla_p100",
        "Quadro RTX 6000",
        "a100l",
        "B2000",
        "",
    ],
)
def test_slices_and_other_models_are_not_taken_for_a_known_gpu(name):
    assert accelerator_of(name) is None
    assert gpu_name(name) == name


def test_every_known_model_has_all_numbers_that_a_prediction_needs():
    for name, accelerator in KNOWN_GPUS.items():
        assert 10e12 < accelerator.flops < 2e15, name
        assert 16e9 <= accelerator.memory_bytes < 300e9, name
        assert accelerator_of(name) == accelerator, name


def test_a_card_in_a_pcie_slot_is_slower_than_the_module_of_the_same_model():
    assert accelerator_of("H100 PCIe").flops < accelerator_of("H100 NVL").flops
    assert accelerator_of("H100 NVL").flops < accelerator_of("H100").flops


def test_a_gpu_among_the_features_of_a_node():
    assert names_one_model(["ib", "hdr", "a100-80gb"]) == "A100"
    assert names_one_model(["a100", "h100"]) == ""
    assert names_one_model(["ib"]) == ""
