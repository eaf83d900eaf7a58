from holmes_ext.cluster.sources.request import (
    ChosenNodes,
    hetjob_lines,
    hostfile,
    node_affinity,
    sbatch_lines,
)

A, B = ("a0", "a1", "a2"), ("b0", "b1")
PARTS = [ChosenNodes("a", A[:2], 8, A), ChosenNodes("b", B[:1], 8, B)]
FEATURES = {**dict.fromkeys(A, ("gpu", "ib")), **dict.fromkeys(B, ("gpu", "roce")), "c0": ("gpu",)}
EACH = "--ntasks-per-node=8 --gpus-per-node=8"


def test_by_name():
    assert sbatch_lines(PARTS) == [f"#SBATCH --nodes=3 {EACH} --nodelist=a[0-1],b0"]
    assert hetjob_lines(PARTS) == [
        f"#SBATCH --nodes=2 {EACH} --nodelist=a[0-1]",
        "#SBATCH hetjob",
        f"#SBATCH --nodes=1 {EACH} --nodelist=b0",
    ]
    assert hetjob_lines(PARTS[:1]) == sbatch_lines(PARTS[:1])


def test_by_feature():
    assert sbatch_lines(PARTS, FEATURES) == [
        f'#SBATCH --nodes=3 {EACH} --constraint="[ib*2&roce*1]"'
    ]
    assert sbatch_lines(PARTS[:1], FEATURES) == [f"#SBATCH --nodes=2 {EACH} --constraint=ib"]
    assert hetjob_lines(PARTS, FEATURES)[2] == f"#SBATCH --nodes=1 {EACH} --constraint=roce"


def test_a_feature_that_others_have_too_is_none_of_the_cluster():
    others = {**FEATURES, "c0": ("gpu", "roce")}
    assert "--nodelist=a[0-1],b0" in sbatch_lines(PARTS, others)[0]


def test_for_mpi_and_kubernetes():
    assert hostfile(PARTS) == "a0 slots=8\na1 slots=8\nb0 slots=8\n"
    terms = node_affinity(PARTS)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert terms == [
        {
            "matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "In", "values": ["a0", "a1", "b0"]}
            ]
        }
    ]
