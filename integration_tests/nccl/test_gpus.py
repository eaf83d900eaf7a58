"""Tests holmes under NCCL on real or emulated GPUs, the most basic cases first.

`make gpu` runs the tests on emulated GPUs. `make nccl` needs a machine with one GPU or more, and runs four
ranks that NCCL takes for four hosts. Without RDMA, the fast networks of the plan are emulated by sockets.
On two nodes with NICs, there are two ranks on each:

    make nccl NODE=0 MASTER_ADDR=host0 CLUSTER=cluster.toml      and NODE=1 on the other, at the same time
"""

import os

import pytest
from carriers import EMULATED

from holmes_ext.cluster.nccl import why_no_verbs
from integration_tests.jobs import over_nccl
from integration_tests.nccl.conftest import GPU, GPUS, NODE, launch

pytestmark = pytest.mark.skipif(
    not GPU,
    reason="needs a CUDA device and a torch built for CUDA: here NCCL cannot be run for real",
)
one_machine = pytest.mark.skipif(NODE is not None, reason="on one machine alone")
two_nodes = pytest.mark.skipif(NODE is None, reason="HOLMES_NCCL_NODE: on two nodes")
NO_RDMA = why_no_verbs({})
HOLMES = ("--holmes",)
if os.environ.get("HOLMES_NCCL_CLUSTER"):
    HOLMES += ("--holmes-cluster", os.environ["HOLMES_NCCL_CLUSTER"])


def flags_and_environment(emulated):
    return emulated("Socket") if NODE is None else (HOLMES, {})


@one_machine
def test_00_ranks_on_one_gpu_are_hosts_to_nccl(tmp_path):
    """NCCL takes ranks on one GPU for hosts, which all other cases on one machine need."""
    done = launch("networks", tmp_path, number=0, NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    assert done.statuses == [0] * 4, done.outputs
    assert [line["world"] for line in done.lines] == [6.0] * 4
    assert all("Socket" in {made.network for made in said.communicators} for said in done.said), (
        done.outputs
    )


@over_nccl
def test_01_each_group_has_the_network_it_asked_for(tmp_path, emulated):
    flags, environment = flags_and_environment(emulated)
    done = launch("networks", tmp_path, *flags, number=1, **environment)
    assert not any(done.statuses), done.outputs
    for line in done.lines:
        assert line["inside"] == (1.0 if line["rank"] < 2 else 5.0) and line["across"] in (
            2.0,
            None,
        ), line
    done.networks_as_asked()


@one_machine
@pytest.mark.skipif(not NO_RDMA, reason="this machine has RDMA: its IB network is there")
def test_02_a_network_that_is_not_there_ends_its_group_alone(tmp_path, emulated):
    """NCCL receives the network of each group, and a group whose network is missing fails alone.

    This is why holmes looks for verbs before it names the network "IB".
    """
    flags, environment = emulated("")
    done = launch("absent_network", tmp_path, *flags, number=2, **environment)
    assert not any(done.statuses) and all(
        line["world"] == 6.0 and line["failed"] for line in done.lines
    ), done.outputs
    assert any(
        "network IB not found" in text or "Failed to initialize any NET plugin" in text
        for said in done.said
        for text in said.warnings
    ), done.outputs


@one_machine
@pytest.mark.skipif(bool(NO_RDMA), reason=f"no RDMA here: {NO_RDMA}")
def test_03_ib_inside_a_cluster_and_sockets_across_on_one_machine(tmp_path):
    """Every rank finds the machine's HCAs, and groups inside a cluster use them."""
    done = launch("networks", tmp_path, "--holmes", "--holmes-preflight", "off", number=3)
    assert not any(done.statuses), done.outputs
    done.networks_as_asked()


@two_nodes
def test_04_the_devices_are_those_that_the_plan_names(tmp_path):
    done = launch("networks", tmp_path, *HOLMES, number=4)
    assert not any(done.statuses), done.outputs
    assert all(made.devices != {""} for said in done.said for made in said.communicators), (
        done.outputs
    )


def test_05_groups_of_their_members_alone_under_a_bound_device(tmp_path, emulated):
    """A group that was split off the default group would hang, as only its members make it."""
    flags, environment = flags_and_environment(emulated)
    done = launch("bound_device", tmp_path, *flags, number=5, **environment)
    assert not any(done.statuses), done.outputs
    assert [line.get("pair") for line in done.lines] == [1.0, 1.0, None, None]
    assert [line["later"] for line in done.lines] == [6.0] * 4
    done.networks_as_asked()


@over_nccl
def test_06_batched_sends_between_stages_of_two_clusters(tmp_path, emulated):
    """The batch would hang if only some neighbours had a process group of their own."""
    flags, environment = flags_and_environment(emulated)
    done = launch("pipeline", tmp_path, *flags, number=6, **environment)
    assert not any(done.statuses), done.outputs
    assert [line["value"] for line in done.lines] == [6.0, 5.0, 4.0, 3.0]
    if NODE is None:
        assert [line["pairs"] for line in done.lines] == [[1], [0, 2], [1, 3], [2]], done.lines


def test_07_a_split_keeps_the_settings_of_its_parent(tmp_path, emulated):
    flags, environment = flags_and_environment(emulated)
    done = launch("split", tmp_path, *flags, number=7, **environment)
    assert not any(done.statuses), done.outputs
    assert all(line["max_ctas"] == 4 and line["priority"] for line in done.lines), done.lines
    assert all(any(made.split for made in said.communicators) for said in done.said), done.outputs
    done.networks_as_asked()


@one_machine
def test_08_a_file_that_forces_a_network_is_refused_in_one_line(tmp_path, emulated):
    (tmp_path / "nccl.conf").write_text("NCCL_NET=IB\n")
    flags, environment = emulated("Socket")
    conf = {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}  # NCCL 2.23 and newer
    done = launch("networks", tmp_path, *flags, number=8, **environment, **conf)
    assert done.statuses == [2] * 4, done.outputs
    assert (
        sum(output.count("overrides the network of every group") for output in done.outputs) == 1
    ), done.outputs


@pytest.mark.parametrize("case, number", [("reduction", 9), ("side_streams", 10)])
def test_09_gradients_are_averaged_as_torch_does(tmp_path, emulated, case, number):
    """Gradients are averaged right in the way that the plan chooses, and from several streams."""
    flags, environment = flags_and_environment(emulated)
    done = launch(case, tmp_path, *flags, number=number, **environment)
    assert not any(done.statuses), done.outputs
    assert all(line["difference"] < 1e-5 for line in done.lines), done.lines


def test_11_telemetry_keeps_no_outputs(tmp_path, emulated):
    """Telemetry, and the watchdog, keep no outputs of collectives outside training steps."""
    flags, environment = flags_and_environment(emulated)
    telemetry = str(tmp_path / "telemetry")
    done = launch(
        "memory", tmp_path, *flags, "--holmes-telemetry", telemetry, number=11, **environment
    )
    assert not any(done.statuses), done.outputs
    assert all(line["kept"] < 4 * 64 * 2**20 for line in done.lines), done.lines


@over_nccl
@pytest.mark.parametrize("connections", ["8", "1"])
def test_12_receives_posted_early_outlive_waits_for_the_device(tmp_path, emulated, connections):
    """Receives do not block waits for the device, with one hardware queue either.

    The process groups of pairs have the job's timeout and priority, and few CTAs.
    """
    flags, environment = flags_and_environment(emulated)
    number = 12 + int(connections == "1")
    done = launch(
        "mailbox",
        tmp_path,
        *flags,
        number=number,
        CUDA_DEVICE_MAX_CONNECTIONS=connections,
        **environment,
    )
    assert not any(done.statuses) and not any(line["wrong"] for line in done.lines), done.outputs
    assert all(one == [4, True, 120.0] for line in done.lines for one in line["settings"]), (
        done.lines
    )


@over_nccl
def test_14_hierarchical_are_the_sum(tmp_path, emulated):
    flags, environment = flags_and_environment(emulated)
    done = launch("hierarchical", tmp_path, *flags, number=14, **environment)
    assert not any(done.statuses), done.outputs
    for line in done.lines:
        limits = {"float32": 1e-6, "bfloat16": 0.02, "int8": 0.05}
        assert all(line["differences"][name] < limit for name, limit in limits.items()), line


def test_15_a_compiled_model_in_ddp(tmp_path, emulated):
    flags, environment = flags_and_environment(emulated)
    done = launch("compiled", tmp_path, *flags, number=15, **environment)
    assert not any(done.statuses), done.outputs
    assert all(line["difference"] < 1e-6 for line in done.lines), done.lines


@one_machine
@pytest.mark.skipif(GPUS < 2, reason="two GPUs in this machine")
@pytest.mark.parametrize("case", ["networks", pytest.param("reduction", marks=over_nccl)])
def test_16_several_gpus_in_a_host(tmp_path, emulated, case):
    flags, environment = emulated("Socket", ("a0", "b0"))
    done = launch(case, tmp_path, *flags, number=16, gpus=2, **environment)
    assert not any(done.statuses), done.outputs
    assert all(line.get("difference", 0.0) < 1e-5 for line in done.lines), done.lines


@over_nccl
def test_17_a_split_that_would_share_its_parents_resources(tmp_path, emulated):
    """Holmes unsets a variable with which a split group could not have a network of its own.

    NCCL would fail with ncclInvalidUsage.
    """
    flags, environment = flags_and_environment(emulated)
    done = launch(
        "split", tmp_path, *flags, number=17, NCCL_COMM_SPLIT_SHARE_RESOURCES="1", **environment
    )
    assert not any(done.statuses), done.outputs
    assert (
        sum("NCCL_COMM_SPLIT_SHARE_RESOURCES=1 is unset" in output for output in done.outputs) >= 1
    ), done.outputs
    done.networks_as_asked()


@over_nccl
def test_18_hybrid_fsdp_on_groups_that_torch_splits_off(tmp_path, emulated):
    flags, environment = flags_and_environment(emulated)
    done = launch("sharded", tmp_path, *flags, number=18, **environment)
    assert not any(done.statuses), done.outputs
    assert all(line["difference"] < 1e-6 for line in done.lines), done.lines
    assert all(any(made.split for made in said.communicators) for said in done.said), done.outputs
    done.networks_as_asked()


@over_nccl
@one_machine
def test_19_a_job_ends_in_one_line_when_its_nic_stays_down(tmp_path, emulated):
    """The port's sysfs file says that the NIC is down; no cable is pulled."""
    flags, environment = emulated("Socket")
    done = launch(
        "nic_down", tmp_path, *flags, "--holmes-link-timeout", "2", number=19, **environment
    )
    assert done.statuses == [2] * 4, done.outputs
    for output in done.outputs:
        assert (
            "has its port mlx5_0:1 in state 1: DOWN" in output and "the job ends here" in output
        ), output


@over_nccl
@pytest.mark.parametrize("connections", ["8", "1"])
def test_20_a_kernel_runs_beside_a_receive_that_waits(tmp_path, emulated, connections):
    """A kernel runs while a receive that was launched before it waits.

    With one hardware queue this holds for one receive. A second receive, which waits for the first, may
    hold the kernel up.
    """
    flags, environment = flags_and_environment(emulated)
    number = 20 + int(connections == "1")
    done = launch(
        "beside_receives",
        tmp_path,
        *flags,
        number=number,
        CUDA_DEVICE_MAX_CONNECTIONS=connections,
        **environment,
    )
    assert not any(done.statuses), done.outputs
    assert all(line["beside 1"] for line in done.lines if line["rank"] % 2 == 0), done.lines
    if EMULATED:
        assert {line["beside 2"] for line in done.lines if line["rank"] % 2 == 0} == {
            connections == "8"
        }
