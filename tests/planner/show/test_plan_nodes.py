"""`holmes plan --nodes`: the subset, how it is asked for, and bad input."""

import json
import shlex

import clusters
import pytest
from test_docs import ROOT

from holmes_ext.cli.main import main
from holmes_ext.cluster.sources import slurm

TOML = clusters.toml("a ib 400Gb/s a[0-3]", "b roce 200Gb/s b[0-3]", ethernet="25Gb/s", processes=8)
SIZES = ("--sizes", "pipeline=2,tensor=8")
MODEL = ("--model", str(ROOT / "examples" / "models" / "gpt_7.5b.toml"), "--global-batch", "96")


@pytest.fixture
def toml(tmp_path):
    (tmp_path / "all.toml").write_text(TOML)
    return str(tmp_path / "all.toml")


def plan(*argv):
    return main(["plan", *map(str, argv)])


def document(capsys, *argv):
    assert plan(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_whole_stages_of_two_clusters(toml, capsys):
    """Six nodes, two stages: three of each cluster, and no reduction leaves one."""
    found = document(capsys, "--nodes", 6, "--from-cluster", toml, *MODEL, *SIZES)
    assert (
        found["best"]["nodes"] == {"a": ["a0", "a1", "a2"], "b": ["b0", "b1", "b2"]}
        and found["all"]
    )
    assert found["others"][0]["step_seconds"] > found["best"]["step_seconds"] and found["gap"] == 0
    assert (
        found["nodelist"] == "a[0-2],b[0-2]" and found["hostfile"].splitlines()[3] == "b0 slots=8"
    )
    assert found["hetjob"].splitlines()[1] == "#SBATCH hetjob"


def test_one_cluster_where_it_is_large_enough(toml, capsys):
    found = document(capsys, "--nodes", 4, "--from-cluster", toml, *MODEL, *SIZES)
    assert list(found["best"]["nodes"]) == ["a"]
    busy = document(
        capsys, "--nodes", 4, "--from-cluster", toml, "--idle", "a[0-1],b[0-3]", *MODEL, *SIZES
    )
    assert busy["best"]["nodes"] in (
        {"b": ["b0", "b1", "b2", "b3"]},
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
    )


def test_sizes_are_searched_where_none_are_given(toml, capsys):
    limits = (
        "--limit",
        "tensor=8",
        "--limit",
        "micro_batch=1",
        "--limit",
        "zero=0",
        "--limit",
        "virtual=1",
    )
    found = document(
        capsys, "--nodes", 4, "--from-cluster", toml, *MODEL, *limits, "--seconds", "20"
    )
    assert sum(map(len, found["best"]["nodes"].values())) == 4 and found["gap"] < 1


def test_the_table_and_the_plan(toml, tmp_path, capsys):
    assert (
        plan(
            "--nodes", 6, "--from-cluster", toml, *MODEL, *SIZES, "--output", tmp_path / "plan.json"
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "6 of the 8 nodes in" in out
        and "3 of a, 3 of b" in out
        and "the first is the best of all" in out
    )
    assert "#SBATCH --nodes=6 --ntasks-per-node=8 --gpus-per-node=8 --nodelist=a[0-2],b[0-2]" in out
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert sorted(saved["nodes"]) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_what_is_idle_and_features_from_slurm(toml, capsys, monkeypatch):
    features = {
        **{f"a{n}": ["ib"] for n in range(4)},
        **{f"b{n}": ["roce"] for n in range(4)},
        "x": ["ib2"],
    }
    monkeypatch.setattr(
        slurm, "idle_nodes", lambda: (["a1", "a2", "a3", "b0", "b1", "b2", "x"], features)
    )
    assert (
        plan(
            "--nodes",
            6,
            "--from-cluster",
            toml,
            "--idle",
            "slurm",
            *MODEL,
            *SIZES,
            "--as",
            "sbatch",
        )
        == 0
    )
    assert capsys.readouterr().out == (
        '#SBATCH --nodes=6 --ntasks-per-node=8 --gpus-per-node=8 --constraint="[ib*3&roce*3]"\n'
    )
    assert (
        plan(
            "--nodes",
            6,
            "--from-cluster",
            toml,
            "--idle",
            "slurm",
            *MODEL,
            *SIZES,
            "--as",
            "hostfile",
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("a1 slots=8\na2 slots=8\na3 slots=8\nb0 slots=8\n")
    assert (
        plan(
            "--nodes",
            2,
            "--from-cluster",
            toml,
            "--idle",
            "slurm",
            *MODEL,
            *SIZES,
            "--as",
            "kubernetes",
        )
        == 0
    )
    assert "nodeAffinity" in json.loads(capsys.readouterr().out)
    monkeypatch.setattr(slurm, "idle_nodes", lambda: (["x"], features))
    assert plan("--nodes", 2, "--from-cluster", toml, "--idle", "slurm", *MODEL, *SIZES) == 2
    assert "is idle now" in capsys.readouterr().err


def test_a_plan_for_the_nodes_of_an_allocation(toml, capsys):
    assert plan("--cluster", toml, "--nodelist", "a[0-1].site.org,b[2-3]", "--pipeline", 2) == 0
    assert "32 ranks on 4 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--nodes", "2"), "--nodes needs --from-cluster FILE"),
        (("--cluster", "FILE", "--idle", "slurm"), "--idle needs --nodes N"),
        (("--from-cluster", "FILE"), "--from-cluster needs --nodes N"),
        ((), "--cluster"),
        (("--nodes", "9", "--from-cluster", "FILE", *MODEL), "has 8 nodes; ask for 1 to 8"),
        (("--nodes", "0", "--from-cluster", "FILE", *MODEL), "ask for 1 to 8"),
        (
            ("--nodes", "5", "--from-cluster", "FILE", "--idle", "a[0-3]", *MODEL),
            "has 4 idle nodes; ask for 1 to 4",
        ),
        (
            ("--nodes", "2", "--from-cluster", "FILE", "--idle", "a0", *MODEL),
            "has 1 idle node; ask for 1",
        ),
        (("--nodes", "4", "--from-cluster", "FILE"), "nothing says what to train"),
        (
            ("--nodes", "4", "--from-cluster", "FILE", "--idle", "a0,z1", *MODEL),
            "--idle: FILE does not know z1",
        ),
        (("--cluster", "FILE", "--nodelist", "a0,z1"), "--nodelist: FILE does not know z1"),
        (("--cluster", "FILE", "--nodelist", "a[0-"), "--nodelist: 'a[0-' is not a list of hosts"),
        (("--nodes", "5", "--from-cluster", "FILE", *MODEL, *SIZES), "divi"),
    ],
)
def test_bad_input_is_one_line(toml, capsys, argv, message):
    assert plan(*(toml if word == "FILE" else word for word in argv)) == 2
    said = capsys.readouterr().err
    assert message in said.replace(toml, "FILE") and len(said.splitlines()) == 1


def test_nodes_with_4_and_8_gpus_are_refused_with_the_options_that_work(tmp_path, capsys):
    """Equally many of them are not equally many GPUs. The printed options choose among equal ones."""
    both = clusters.toml(
        *("a ib 400Gb/s a[0-3] processes=8", "b roce 200Gb/s b[0-3] processes=4"), ethernet="25Gb/s"
    )
    (tmp_path / "both.toml").write_text(both)
    argv = ("--nodes", 2, "--from-cluster", tmp_path / "both.toml", *MODEL, *SIZES)
    assert plan(*argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "--nodelist LIST" in error
    words = shlex.split(error.replace(";", " "))
    listed = [words[index + 1] for index, word in enumerate(words) if word == "--idle"]
    assert listed == ["b[0-3]", "a[0-3]"]
    found = document(capsys, *argv, "--idle", listed[1])
    assert found["best"]["nodes"] == {"a": ["a0", "a1"]}
