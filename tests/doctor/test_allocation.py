import pytest

from holmes_ext.cluster.spec import parse_spec
from holmes_ext.doctor.allocation import allocated, check_nodes, for_srun, srun
from holmes_ext.errors import HolmesError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[0-1]"}
TWO = {
    **JOB,
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "b0",
}
END = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "x"]


def test_srun_reaches_every_node_once():
    assert srun(JOB, "", ["x"]) == ["srun", *END]
    assert srun(TWO, "", ["x"]) == ["srun", "--het-group=0-1", *END]
    assert srun({}, "--nodes 4 -p 'a b'", ["x"]) == ["srun", "--nodes", "4", "-p", "a b", *END]


def test_srun_is_not_told_of_a_process_for_each_gpu():
    said = {"SLURM_NTASKS": "16", "SLURM_NPROCS_HET_GROUP_1": "8", "SLURM_NTASKS_PER_NODE": "8"}
    assert for_srun({**JOB, **said}) == JOB


@pytest.mark.parametrize(
    "options, message", [("", "this is no allocation"), ("--nodes '4", "No closing quotation")]
)
def test_bad_options(options, message):
    with pytest.raises(HolmesError, match=message):
        srun({}, options, ["x"])


def test_nodes_of_an_allocation():
    assert (
        allocated({}) == []
        and allocated(JOB) == ["a0", "a1"]
        and allocated(TWO) == ["a0", "a1", "b0"]
    )


def test_an_allocation_that_the_file_does_not_know():
    spec = parse_spec(
        'version = 2\n[ethernet]\nrate = "1Gb/s"\n[[cluster]]\nname = "a"\nkind = "ethernet"\n'
        'nodes = ["a0.site.org", "a1"]\n',
        "c.toml",
    )
    check_nodes(["a0", "a1"], spec)
    with pytest.raises(
        HolmesError,
        match="^c.toml: no cluster has node b0, c1 of the allocation; add it to one, or:",
    ):
        check_nodes(["a0", "b0", "c1"], spec)
