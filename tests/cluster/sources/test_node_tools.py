"""Outputs of ibstat, ibv_devinfo, nvidia-smi and lspci from public pages, cut to what matters.

docs/inputs.md lists where each comes from.
"""

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.sources.node_tools import read_outputs
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError

#: Eight GPUs, so that a text with NICs only is complete.
GPUS = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n})\n" for n in range(8))
G = 10**9


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the node that a file with the given text describes.

    It returns the node's kind, bits/s, processes, GPU and notes.
    """

    def read_text(text):
        (tmp_path / "gpu01.txt").write_text(text)
        (found,) = read_outputs([str(tmp_path / "gpu01.txt")])
        node = found.node
        assert node.name == "gpu01"
        return node.kind, node.rate_bps, node.processes, node.gpu, "; ".join(found.notes)

    return read_text


def ca(name, *ports):
    """Output of ibstat for one HCA: its ports are (state, rate, link layer)."""
    lines = [f"CA '{name}'", "\tCA type: MT4129", f"\tNumber of ports: {len(ports)}"]
    for number, (state, rate, layer) in enumerate(ports, start=1):
        lines += [f"\tPort {number}:", f"\t\tState: {state}", "\t\tPhysical state: LinkUp"]
        lines += [f"\t\tRate: {rate}", "\t\tBase lid: 13", f"\t\tLink layer: {layer}"]
    return "\n".join(lines) + "\n"


def hca(name, *ports, transport="InfiniBand (0)", speed=""):
    """Output of ibv_devinfo for one HCA: its ports are (state, link layer); `speed` with -v."""
    lines = [f"hca_id:\t{name}", f"\ttransport:\t\t\t{transport}", "\tfw_ver:\t\t\t\t28.39.2048"]
    lines.append(f"\tphys_port_cnt:\t\t\t{len(ports)}")
    for number, (state, layer) in enumerate(ports, start=1):
        lines += [
            f"\t\tport:\t{number}",
            f"\t\t\tstate:\t\t\t{state}",
            "\t\t\tmax_mtu:\t\t4096 (5)",
        ]
        lines.append(f"\t\t\tlink_layer:\t\t{layer}")
        if speed:
            lines += ["\t\t\tactive_width:\t\t4X (2)", f"\t\t\tactive_speed:\t\t{speed}"]
    return "\n".join(lines) + "\n\n"


UP = ("Active", 400, "InfiniBand")
ACTIVE = "PORT_ACTIVE (4)"


@pytest.mark.parametrize(
    "text, kind, rate, notes",
    [
        (ca("mlx4_0", ("Active", 40, "InfiniBand")), "ib", 40, ""),
        (
            ca("mlx4_0", ("Down", 10, "InfiniBand"), ("Active", 56, "InfiniBand")),
            "ib",
            56,
            "mlx4_0:1: down",
        ),
        (ca("mlx5_0", ("Active", 100, "InfiniBand")), "ib", 100, ""),
        ("".join(ca(f"mlx5_{n}", UP) for n in range(8)), "ib", 3200, ""),
        # A DGX H100: two slower ports are for storage.
        (
            "".join(ca(f"mlx5_{n}", UP) for n in range(8))
            + ca("mlx5_8", ("Active", 200, "InfiniBand")),
            *("ib", 3200, "mlx5_8:1: slower"),
        ),
        (
            ca("mlx5_0", ("Active", 200, "Ethernet"))
            + ca("mlx5_bond_0", ("Active", 100, "Ethernet")),
            *("roce", 200, "mlx5_bond_0:1: slower"),
        ),
        (ca("mlx5_0", ("Active", "100 Gbps", "InfiniBand")), "ib", 100, ""),
        # A comment after the state, and no link layer.
        (ca("mlx4_0", ("Active          # else Down", 40, "InfiniBand")), "ib", 40, ""),
        ("CA 'mlx5_0'\n  Port 1:\n    State: Active\n    Rate: 200\n", "", 200, ""),
        # ibstat of a device that is lost ends with this line.
        (
            ca("mlx5_7", ("Active", 200, "InfiniBand"))
            + "ibpanic: [1323906] main: stat of IB device 'mlx5_8' failed: No such file or directory\n",
            *("ib", 200, ""),
        ),
        (ca("hfi1_0", ("Active", 100, "InfiniBand")), "opa", 100, ""),
        (
            "Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n"
            "\trate:\t\t 200 Gb/sec (4X HDR)\n\tlink_layer:\t InfiniBand\n",
            *("ib", 200, ""),
        ),
        (
            ca("mlx5_0", ("Initializing", 100, "InfiniBand")),
            "",
            0,
            "no port of a fast NIC is up (mlx5_0:1)",
        ),
    ],
)
def test_ibstat(read, text, kind, rate, notes):
    found = read(GPUS + text)
    assert found[:4] == (kind, rate * G, 8, "H100")
    assert notes in found[4] and bool(notes) == bool(found[4])


@pytest.mark.parametrize(
    "text, kind, rate, notes",
    [
        ("".join(hca(f"mlx5_{n}", (ACTIVE, "InfiniBand")) for n in range(8)), "ib", 0, ""),
        ("".join(hca(f"mlx5_{n}", (ACTIVE, "Ethernet")) for n in range(4)), "roce", 0, ""),
        # Azure: one Ethernet device with accelerated networking beside InfiniBand.
        (
            hca("mlx5_ib0", (ACTIVE, "InfiniBand")) + hca("mlx5_an0", (ACTIVE, "Ethernet")),
            *("ib", 0, "mlx5_an0:1: not ib"),
        ),
        (hca("mlx4_0", (ACTIVE, "Ethernet"), (ACTIVE, "Ethernet")), "roce", 0, ""),
        (
            hca("mlx5_12", ("PORT_DOWN (1)", "Ethernet")) + hca("mlx5_13", (ACTIVE, "Ethernet")),
            *("roce", 0, "mlx5_12:1: down"),
        ),
        (
            hca("siw0", (ACTIVE, "Ethernet"), transport="iWARP (1)"),
            "",
            0,
            "no port of a fast NIC is up",
        ),
        (hca("rxe0", (ACTIVE, "Ethernet")), "", 0, "no port of a fast NIC is up (rxe0:1)"),
        (hca("rdmap16s27", (ACTIVE, "Unspecified"), transport="unspecified (4)"), "efa", 0, ""),
        (hca("rocep1s0f1", (ACTIVE, "Ethernet"), speed="25.0 Gbps (32)"), "roce", 100, ""),
        (hca("mlx5_0", (ACTIVE, "InfiniBand"), speed="100.0 Gbps (128)"), "ib", 400, ""),
        (hca("erdma_0", (ACTIVE, "Ethernet")), "erdma", 0, ""),
    ],
)
def test_ibv_devinfo(read, text, kind, rate, notes):
    found = read(text + GPUS)
    assert found[:4] == (kind, rate * G, 8, "H100")
    assert notes in found[4] and bool(notes) == bool(found[4])


def topology(gpus, nics, header_end="CPU Affinity\tNUMA Affinity"):
    """Output of `nvidia-smi topo -m`."""
    names = [*(f"GPU{n}" for n in range(gpus)), *nics]
    rows = [
        "\t".join([name, *("X" if other == name else "SYS" for other in names)]) for name in names
    ]
    return "\n".join(
        ["\t" + "\t".join([*names, header_end]), *rows, "", "Legend:", "  X    = Self"]
    )


@pytest.mark.parametrize(
    "text, gpus, name",
    [
        (topology(8, [f"NIC{n}" for n in range(10)]), 8, ""),
        (topology(4, ["mlx4_0"], "CPU Affinity"), 4, ""),  # 2017: devices have their own names
        ("\x1b[4m" + topology(8, ["NIC0"]) + "\x1b[0m", 8, ""),
        (topology(1, []), 1, ""),
        (GPUS, 8, "H100"),
        ("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5)\n", 1, "A100-SXM4-40GB"),
        (
            "|   0  NVIDIA A100-SXM4-80GB          On  | 00000000:07:00.0 Off |                    0 |\n"
            "| N/A   28C    P0    60W / 400W |      0MiB / 81251MiB |      0%      Default |\n"
            "|   1  NVIDIA A100-SXM4-80GB          On  | 00000000:0F:00.0 Off |                    0 |\n",
            *(2, "A100"),
        ),
        (
            "|   0  Tesla V100-SXM2...  Off  | 00000000:1A:00.0 Off |                    0 |\n",
            1,
            "V100",
        ),
        (
            "|   0  NVIDIA H200                    On  |   00000000:19:00.0 Off |   Off |\n",
            1,
            "H200",
        ),
        ("GPU 0: NVIDIA H100\nGPU 1: NVIDIA A100\n", 2, ""),
    ],
)
def test_nvidia_smi(read, text, gpus, name):
    found = read(text)
    assert found[2:4] == (gpus, name) and found[:2] == ("", 0)


CX6 = "b1:00.0 Infiniband controller: Mellanox Technologies MT28908 Family [ConnectX-6]\n"
H100 = "3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)\n"


@pytest.mark.parametrize(
    "text, gpus, kind",
    [
        ("".join(f"{bus}:00.0 {H100}" for bus in ("19", "3b", "4c", "5d")) + CX6, 4, "ib"),
        ("00:1e.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB]\n", 1, ""),
        ("0000:00:1e.0 3D controller: NVIDIA Corporation TU104GL [Tesla T4] (rev a1)\n", 1, ""),
        ("00:1e.0 3D controller: NVIDIA Corporation TU104GL [Tesla T4] (rev a1)\n" + CX6, 1, "ib"),
        (
            f"19:00.0 {H100}82:00.0 Infiniband controller: Mellanox Technologies MT27500 [ConnectX-3]\n",
            *(1, "ib"),
        ),
        (
            f"19:00.0 {H100}98:00.0 Ethernet controller: Mellanox Technologies [ConnectX-4 Lx]\n",
            1,
            "",
        ),
        (
            f"19:00.0 {H100}a6:00.0 Ethernet controller: Amazon.com, Inc. Elastic Fabric Adapter (EFA)\n",
            *(1, "efa"),
        ),
        (
            f"19:00.0 {H100}18:00.0 Fabric controller: Intel Corporation Omni-Path HFI Silicon 100\n",
            1,
            "opa",
        ),
        (
            "01:00.0 VGA compatible controller: NVIDIA Corporation GA104\n" + f"02:00.0 {H100}",
            1,
            "",
        ),
        (
            "c5:00.0 Processing accelerators: Advanced Micro Devices, Inc. [AMD/ATI] Aldebaran [MI250X]\n",
            *(1, ""),
        ),
    ],
)
def test_lspci(read, text, gpus, kind):
    found = read(text)
    assert (found[2], found[0], found[1]) == (gpus, kind, 0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "nothing here is the output of"),
        ("CPU(s): 96\n", "nothing here is the output of"),
        (
            ca("mlx5_0", UP),
            "the number of GPUs of gpu01 is not in it; on that node: nvidia-smi -L >> ",
        ),
        (CX6, "the number of GPUs of gpu01 is not in it"),
    ],
)
def test_what_is_missing_is_one_line(read, text, message):
    with pytest.raises(HolmesError, match=message):
        read(text)


def test_a_file_of_several_nodes_from_a_parallel_shell(tmp_path):
    lines = {name: (GPUS + ca("mlx5_0", UP)).splitlines() for name in ("a1", "a2")}
    text = "\n".join(
        f"{name}: {line}" for pair in zip(*lines.values()) for name, line in zip(lines, pair)
    )
    (tmp_path / "all.txt").write_text(text)
    nodes = [found.node for found in read_outputs([str(tmp_path / "all.txt")])]
    assert [(node.name, node.processes, node.rate_bps) for node in nodes] == [
        ("a1", 8, 400 * G),
        ("a2", 8, 400 * G),
    ]


def test_discover_writes_a_cluster_file(tmp_path, capsys):
    for name, layer in (("a1", "InfiniBand"), ("a2", "InfiniBand"), ("b1", "Ethernet")):
        (tmp_path / f"{name}.txt").write_text(GPUS + ca("mlx5_0", ("Active", 400, layer)))
    files = [str(tmp_path / f"{name}.txt") for name in ("a1", "a2", "b1")]
    output = tmp_path / "cluster.toml"
    argv = ["discover", "--from", "ibstat", *files, "--rate", "ethernet=25Gb/s"]
    assert main([*argv, "--output", str(output)]) == 0
    assert [(c.name, c.kind, c.nodes, c.rate_bps, c.gpu) for c in load_spec(output).clusters] == [
        ("a", "ib", ("a1", "a2"), 400 * G, "H100"),
        ("b", "roce", ("b1",), 400 * G, "H100"),
    ]
    (tmp_path / "c1.txt").write_text(GPUS + hca("mlx5_0", (ACTIVE, "Ethernet")))
    assert main(["discover", "--from", "ibv_devinfo", str(tmp_path / "c1.txt")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        "the output of ibv_devinfo has no rate of cluster 'c'" in error and "--rate c=..." in error
    )
