"""`holmes discover --from slurm | kubernetes | hostfile`: what it writes, asks and says."""

import io
from pathlib import Path

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.sources import slurm
from holmes_ext.cluster.spec import load_spec

PUBLIC = Path(__file__).parents[1] / "cluster" / "sources" / "public"
ANSWERS = {
    ("scontrol", "--version"): "slurm 22.05.8\n",
    ("scontrol", "show", "node", "--oneliner"): "\n".join(
        f"NodeName={name} AvailableFeatures={feature} Gres=gpu:{gpu}:8 State={state} Partitions={partitions}"
        for name, feature, gpu, state, partitions in (
            ("a1", "ib", "a100", "IDLE", "gpu"),
            ("a2", "ib", "a100", "IDLE", "gpu"),
            ("b1", "(null)", "h100", "ALLOCATED", "gpu,new"),
            ("b2", "(null)", "h100", "ALLOCATED", "gpu,new"),
        )
    ),
    ("scontrol", "show", "topology"): "SwitchName=l1 Nodes=a[1-2]\nSwitchName=l2 Nodes=b[1-2]\n",
}
GIVEN = (
    "--rate",
    "ib=200Gb/s",
    "--rate",
    "new=400Gb/s",
    "--kind",
    "new=roce",
    "--rate",
    "ethernet=25Gb/s",
)


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(slurm, "run_command", lambda *argv: ANSWERS[argv])


def discover(*argv):
    return main(["discover", "--from", *map(str, argv)])


def test_a_new_file_from_slurm(ask, tmp_path, capsys):
    file = tmp_path / "cluster.toml"
    assert discover("slurm", *GIVEN, "--output", file) == 0
    spec = load_spec(file)
    assert [(c.name, c.kind, c.nodes, c.rate_bps, c.gpu) for c in spec.clusters] == [
        ("ib", "ib", ("a1", "a2"), 200 * 10**9, "A100"),
        ("new", "roce", ("b1", "b2"), 400 * 10**9, "H100"),
    ]
    said = capsys.readouterr().err
    assert "cluster new: 2 x 8 processes, roce: b[1-2]" in said and "now allocated: b[1-2]" in said


def test_it_is_printed_without_a_file(ask, capsys):
    assert discover("slurm", *GIVEN) == 0
    assert '[[cluster]]\nname = "ib"' in capsys.readouterr().out


def test_what_is_there_stays(ask, tmp_path, capsys):
    file = tmp_path / "cluster.toml"
    old = (
        'version = 2\n[ethernet]\nrate = "10Gb/s"  # measured\n[[cluster]]\nname = "old"\nkind = "ib"\n'
        'rate = "100Gb/s"\nnodes = ["a1", "gone"]\n'
    )
    file.write_text(old)
    assert discover("slurm", "--rate", "new=400Gb/s", "--kind", "new=roce", "--output", file) == 0
    assert file.read_text().startswith(old.replace('"gone"]', '"gone", "a2"]'))
    said = capsys.readouterr().err
    assert "cluster old: added a2" in said and "kept nodes that were not found: gone" in said
    again = file.read_text()
    same = ("--rate", "old=100Gb/s", "--rate", "new=400Gb/s", "--kind", "new=roce")
    for given in ((), (*same, "--rate", "ethernet=10Gb/s")):
        assert discover("slurm", *given, "--output", file) == 0 and file.read_text() == again
        said = capsys.readouterr().err
        assert "nothing was changed" in said and "edit the file" not in said
    other = ("--rate", "old=200Gb/s", "--kind", "new=ib", "--rate", "ethernet=25Gb/s")
    assert discover("slurm", *other, "--output", file) == 0 and file.read_text() == again
    said = capsys.readouterr().err
    for what in ("cluster old", "cluster new", "ethernet"):
        assert f"{what} stays as the file has it" in said


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_person_is_asked(ask, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("200Gb/s\nwifi\nroce\nfast\n400Gb/s\n25Gb/s\n"))
    file = tmp_path / "cluster.toml"
    assert discover("slurm", "--output", file) == 0
    spec = load_spec(file)
    assert [(c.kind, c.rate_bps) for c in spec.clusters] == [
        ("ib", 200 * 10**9),
        ("roce", 400 * 10**9),
    ]
    assert (
        spec.ethernet_rate_bps == 25 * 10**9 and "'wifi' is not one of" in capsys.readouterr().err
    )
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert discover("slurm") == 2 and "no answer: nothing was written" in capsys.readouterr().err


def test_what_slurm_does_not_know_is_asked_for_by_option(ask, capsys):
    assert discover("slurm") == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "give --kind new=... --rate ib=... --rate new=... --rate ethernet=..." in said


def test_a_topology_file(ask, tmp_path):
    (tmp_path / "topology.conf").write_text("SwitchName=x Nodes=a1,b1\nSwitchName=y Nodes=a2,b2\n")
    file = tmp_path / "cluster.toml"
    rates = [f"--rate={name}=1Gb/s" for name in ("x", "y", "cluster3", "cluster4", "ethernet")]
    kinds = ["--kind=cluster3=roce", "--kind=cluster4=roce"]
    assert (
        discover(
            "slurm", "--topology", tmp_path / "topology.conf", *rates, *kinds, "--output", file
        )
        == 0
    )
    assert [c.nodes for c in load_spec(file).clusters] == [("a1",), ("a2",), ("b1",), ("b2",)]


def test_kubernetes_and_hostfile(tmp_path, capsys):
    assert (
        discover("kubernetes", PUBLIC / "coreweave_nodes.json", "--rate", "ethernet=100Gb/s") == 0
    )
    assert 'rate = "3.2Tb/s"' in capsys.readouterr().out
    (tmp_path / "hosts").write_text("a0 slots=8\nb0 slots=8\n")
    kinds = ["--kind", "a=ib", "--kind", "b=ethernet"]
    assert (
        discover(
            "hostfile", tmp_path / "hosts", *kinds, "--rate", "a=1Gb/s", "--rate", "ethernet=1Gb/s"
        )
        == 0
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        (("slrm",), "did you mean 'slurm'?"),
        (("slurm", "x.txt", "y.txt"), "--from slurm: it takes one file at most"),
        (("kubernetes",), "--from kubernetes: it is read from one file"),
        (("kubernetes", "none.json"), "none.json: cannot be read"),
        (
            ("hostfile", "x", "--partition", "p"),
            "--partition and --topology only apply to --from slurm",
        ),
        (("slurm", "--rate", "x"), "--rate: 'x' is not NAME=VALUE"),
        (("slurm", "--rate", "ethernet=fast"), "--rate ethernet"),
        (("slurm", "--rate", "zz=1Gb/s"), "no cluster 'zz' was found"),
        (("slurm", "--partition", "zz"), "Slurm has no node in it"),
    ],
)
def test_bad_input_is_one_line(ask, capsys, argv, message):
    assert discover(*argv) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_options_of_sources_need_a_source(capsys):
    assert main(["discover", "--rate", "a=1Gb/s"]) == 2
    assert "--rate only applies to --from slurm, kubernetes or hostfile" in capsys.readouterr().err
