"""Clusters from the output of Slurm and Kubernetes and from hostfiles.

public/README.md names where the files come from.
"""

import json
import subprocess
from pathlib import Path

import pytest

from holmes_ext.cluster.sources import hostfile, kubernetes, slurm, write
from holmes_ext.cluster.sources.found import (
    FoundCluster,
    FoundNode,
    clusters_of,
    completed,
    kind_of,
)
from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.sources.topology import BLOCKS, Topology, parse_topology
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError

PUBLIC = Path(__file__).parent / "public"


def topology(name):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    return parse_topology((PUBLIC / name).read_text(), str(PUBLIC / name))


@pytest.mark.parametrize(
    "name, fabrics",
    [
        ("spartan_topology.conf", {"sp-266-p16-1": "spartan-bm[053-055,087-089,001-002,039-040]"}),
        (
            "leonardo_show_topology.txt",
            {"isw-L2-CELLG1": "lrdn[0001-0004,0013-0014]", "isw-L2-CELLG2": "lrdn[0181-0184]"},
        ),
        (
            "gcm_show_topology_blocks.txt",
            {BLOCKS: "g3-129-[057,059,063,127,129,235,237],g3-130-[001,003]"},
        ),
        (
            "gcm_show_topology_switches.txt",
            {"cpu": "cpu-000-109,cpu-002-219", "spine-use2-az3-0": "h100-008-154,h100-236-009"},
        ),
        ("slinky_topology.yaml", {"sw_root": "slurm-node[1-4]"}),
        ("hyperpod_topology.yaml", {"root": "compute-[1-3]"}),
    ],
)
def test_public_topologies(name, fabrics):
    found = topology(name).fabric_of
    assert found == {
        node: fabric for fabric, nodes in fabrics.items() for node in expand(nodes, name)
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("SwitchName=s1 Nodes=a[0-3]\nSwitchName=s2 Nodes=a[3-5]", "node 'a3' is in 's1' and 's2'"),
        ("SwitchName=s1 Nodes=a0,a0", "node 'a0' is in 's1' twice"),
        ("SwitchName=s1 Nodes=a0\nBlockName=b Nodes=a0", "node 'a0' is in 's1' and 'b'"),
        ("SwitchName=s1 Switches=s2\nSwitchName=s2 Switches=s1", "is above itself"),
        ("SwitchName=s1 Nodes=a0\nSwitchName=s1 Nodes=a1", "line 2: 's1' is given twice"),
        ("\nSwitchName=s1 Nodes=a[0-", "t.conf: line 2: 'a\\[0-' is not a list of hosts"),
    ],
)
def test_bad_topologies(text, message):
    with pytest.raises(HolmesError, match=f"^t.conf: .*{message}|^{message}"):
        parse_topology(text, "t.conf")


@pytest.mark.parametrize(
    "text", ["", "a: 1", "- 7", "[", "- topology: t\n  tree:\n    switches: 7"]
)
def test_bad_yaml(text):
    pytest.importorskip("yaml")
    with pytest.raises(HolmesError, match="^t.yaml"):
        parse_topology(text, "t.yaml")


NODES = """\
NodeName=ib1 Arch=x86_64 CoresPerSocket=32 CPUTot=64 AvailableFeatures=ib,hdr ActiveFeatures=ib \
Gres=gpu:a100:8(S:0-1) OS=Linux 5.14.0 #1 SMP PREEMPT_DYNAMIC Thu State=IDLE ThreadsPerCore=1 \
Partitions=gpu,all Reason=a = b [root@x]
NodeName=ib2 AvailableFeatures=ib,hdr Gres=gpu:a100:8(S:0-1) State=MIXED Partitions=gpu,all
NodeName=rc1 AvailableFeatures=ROCE_v2 Gres=gpu:h100:4,craynetwork:4 State=IDLE+DRAIN Partitions=gpu,new,all
NodeName=rc2 AvailableFeatures=ROCE_v2 Gres=gpu:h100:4 State=DOWN* Partitions=new,all
NodeName=x1 AvailableFeatures=(null) Gres=gpu:2 State=IDLE~ Partitions=all
NodeName=cpu1 AvailableFeatures=(null) Gres=(null) State=IDLE Partitions=cpu,all
"""
TREE = parse_topology(
    "SwitchName=l1 Nodes=ib[1-2]\nSwitchName=l2 Nodes=rc[1-2],x1\nSwitchName=up Switches=l[1-2]",
    "t",
)


def test_nodes_of_slurm():
    found = slurm.parse_nodes(NODES, TREE)
    assert [(node.name, node.processes, node.kind, node.gpu, node.why_not) for node in found] == [
        ("ib1", 8, "ib", "A100", ""),
        ("ib2", 8, "ib", "A100", "mixed"),
        ("rc1", 4, "roce", "H100", "drain"),
        ("rc2", 4, "roce", "H100", "down"),
        ("x1", 2, "", "", ""),
    ]
    assert {node.fabric for node in found} == {"up"}
    clusters = clusters_of(found)
    assert [(c.name, c.nodes, c.fabric) for c in clusters] == [
        ("ib", ("ib1", "ib2"), ""),
        ("new", ("rc1", "rc2"), ""),
        ("up", ("x1",), ""),
    ]
    assert [node.name for node in slurm.parse_nodes(NODES, TREE, ["new"])] == ["rc1", "rc2"]
    assert slurm.parse_nodes(NODES, TREE, ["cpu"])[0].processes == 1
    with pytest.raises(
        HolmesError, match="--partition 'nwe': Slurm has no node in it; its partitions are all, cpu"
    ):
        slurm.parse_nodes(NODES, TREE, ["nwe"])


def test_gpus_of_two_kinds_on_one_fabric_can_talk():
    lines = (
        "NodeName=a1 AvailableFeatures=ib Gres=gpu:a100:8\nNodeName=h1 AvailableFeatures=ib "
        "Gres=gpu:h100:8"
    )
    clusters = clusters_of(
        slurm.parse_nodes(lines, parse_topology("SwitchName=s-1 Nodes=a1,h1", "t"))
    )
    assert [(c.name, c.fabric) for c in clusters] == [("ib-a100", "s-1"), ("ib-h100", "s-1")]


@pytest.mark.parametrize(
    "gres, features, gpu",
    [
        ("gpu:8", "ib,A100", "A100"),
        ("gpu:8", "nvidia_h100,roce", "H100"),
        ("gpu:a100:8", "h100", "A100"),
        ("gpu:8", "a100,h100", ""),
        ("(null)", "a100", ""),
    ],
)
def test_a_gpu_that_only_a_feature_names(gres, features, gpu):
    line = f"NodeName=n1 AvailableFeatures={features} Gres={gres}"
    assert slurm.parse_nodes(line, parse_topology("", "t"))[0].gpu == gpu


@pytest.mark.parametrize(
    "words, kind",
    [
        (["ib"], "ib"),
        (["gpu_IB-fabric"], "ib"),
        (["HDR100", "h100"], "ib"),
        (["RoCE"], "roce"),
        (["roce", "ib"], ""),
        (["ddr5", "skylake"], ""),
        ([], ""),
    ],
)
def test_kind_of_features(words, kind):
    assert kind_of(words) == kind


@pytest.mark.parametrize(
    "done, message",
    [
        (FileNotFoundError(), "there is no `scontrol` on this machine"),
        (subprocess.TimeoutExpired("x", 1), "does not answer within"),
        (PermissionError(13, "Permission denied"), "cannot be started: Permission denied"),
        (
            subprocess.CompletedProcess(
                [], 1, "", "slurm_load_node error: Unable to contact slurm controller"
            ),
            "`scontrol show node` failed: slurm_load_node error: Unable to contact",
        ),
        (
            subprocess.CompletedProcess(
                [],
                1,
                "",
                "scontrol: error: If munged is up, restart with --num-threads=10\n"
                'scontrol: error: Munge encode failed: Failed to access "/run/munge"',
            ),
            "Slurm's munge does not answer on this machine",
        ),
        (subprocess.CompletedProcess([], 1, "", ""), "failed: status 1"),
    ],
)
def test_what_slurm_does_not_answer_is_one_line(monkeypatch, done, message):
    def run(*_, **__):
        if isinstance(done, Exception):
            raise done
        return done

    monkeypatch.setattr(slurm.subprocess, "run", run)
    with pytest.raises(HolmesError, match=message):
        slurm.run_command("scontrol", "show", "node")


@pytest.mark.parametrize(
    "said, good",
    [
        ("slurm 22.05.8", True),
        ("slurm-wlm 21.08.5", True),
        ("slurm 19.05.5", False),
        ("slurm 25.05.1-rc1", True),
        ("what", True),
    ],
)
def test_an_old_slurm_is_refused(monkeypatch, said, good):
    monkeypatch.setattr(slurm, "run_command", lambda *_: f"{said}\n")
    if good:
        slurm.check_version()
    else:
        with pytest.raises(
            HolmesError, match=f"{said} is too old: holmes reads Slurm 20.02 and newer"
        ):
            slurm.check_version()


@pytest.mark.parametrize(
    "name, expected",
    [
        ("openshift_rdma_nodes.json", [("ib-l40s", 2, 2, "ib", "L40S", 0)]),
        ("xe9680_nodes.json", [("h100", 3, 8, "", "H100", 0)]),
        ("eks_node.json", [("g5.12xlarge", 1, 4, "", "A10G", 0)]),
        (
            "coreweave_nodes.json",
            [
                ("us-east-04b-ib-1", 2, 8, "ib", "H100", 3200 * 10**9),
                ("us-east-04a-ib-2", 1, 8, "ib", "H100", 3200 * 10**9),
                ("gd-8xh200-roce", 1, 8, "roce", "H200", 3200 * 10**9),
            ],
        ),
    ],
)
def test_public_nodes_of_kubernetes(name, expected):
    clusters = clusters_of(kubernetes.read_nodes(str(PUBLIC / name)))
    assert [
        (c.name, len(c.nodes), c.processes, c.kind, c.gpu, c.rate_bps) for c in clusters
    ] == expected


def test_nodes_that_take_no_pods_are_known():
    found = kubernetes.read_nodes(str(PUBLIC / "xe9680_nodes.json"))
    assert [node.why_not for node in found] == ["", "cordoned", "not ready"]


@pytest.mark.parametrize(
    "document, message",
    [
        ("{", "not valid JSON"),
        ("[]", "not Kubernetes nodes"),
        ('{"items": [{"kind": "Pod"}]}', "not Kubernetes nodes"),
        ('{"items": []}', "no node has a GPU"),
        ('{"kind": "Node", "metadata": {}}', "a node has no name"),
        (
            '{"kind": "Node", "metadata": {"name": "x", "labels": 7}, "status": []}',
            "no node has a GPU",
        ),
    ],
)
def test_what_is_no_list_of_nodes(tmp_path, document, message):
    (tmp_path / "n.json").write_text(document)
    with pytest.raises(HolmesError, match=f"n.json: {message}"):
        kubernetes.read_nodes(str(tmp_path / "n.json"))


def hosts(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    return hostfile.read_hostfile(str(tmp_path / "hosts"))


def test_hostfiles(tmp_path):
    found = hosts(
        tmp_path,
        "# all\ngpu01 slots=8\ngpu02 slots=8 max_slots=8  # new\n\nib-7.site.org:4\nx\nx\n",
    )
    assert [(node.name, node.processes, node.fabric) for node in found] == [
        ("gpu01", 8, "gpu"),
        ("gpu02", 8, "gpu"),
        ("ib-7.site.org", 4, "ib"),
        ("x", 2, "x"),
    ]
    assert [(c.name, c.nodes) for c in clusters_of(found)] == [
        ("gpu", ("gpu01", "gpu02")),
        ("ib", ("ib-7.site.org",)),
        ("x", ("x",)),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no host is named"),
        ("a0 slots=x", "line 1: 'x' slots"),
        ("a0\n\n$a slots=1", "line 3: '\\$a' is not a host"),
        ("a0 slots=1\na0 slots=1", "line 2: host 'a0' is named twice"),
        ("a0:0", "'0' slots"),
    ],
)
def test_bad_hostfiles(tmp_path, text, message):
    with pytest.raises(HolmesError, match=message):
        hosts(tmp_path, text)


def test_a_node_that_is_named_twice():
    with pytest.raises(HolmesError, match="node 'a0' is named twice"):
        clusters_of([FoundNode("a0", 8), FoundNode("a0", 8)])
    with pytest.raises(HolmesError, match="no node has a GPU"):
        clusters_of([])


def test_missing_values():
    found = [
        FoundCluster("a", ("a0",), 8, "ib"),
        FoundCluster("b", ("b0",), 8),
        FoundCluster("c", ("c0",), 8, "ethernet"),
    ]
    full, missing = completed(found, {"b": "roce"}, {"a": 10**9})
    assert missing == [("rate", "b")] and full[0].rate_bps == 10**9 and full[1].kind == "roce"
    assert completed(found, {}, {}).missing == [("kind", "b"), ("rate", "a"), ("rate", "b")]
    with pytest.raises(HolmesError, match="no cluster 'x' was found; there are a, b, c"):
        completed(found, {"x": "ib"}, {})
    with pytest.raises(HolmesError, match="'wifi' is not one of"):
        completed(found, {"b": "wifi"}, {})


FULL = [
    FoundCluster("a", ("a0", "a1", "a2"), 8, "ib", "H100", 400 * 10**9),
    FoundCluster("b", ("b0",), 4, "ethernet"),
]


def test_a_new_file_is_read_back():
    spec = parse_spec(write.new_file(FULL, 25 * 10**9, "Slurm"))
    assert spec.ethernet_rate_bps == 25 * 10**9
    assert [(c.name, c.kind, c.nodes, c.rate_bps, c.processes, c.gpu) for c in spec.clusters] == [
        ("a", "ib", ("a0", "a1", "a2"), 400 * 10**9, 8, "H100"),
        ("b", "ethernet", ("b0",), 0, 4, ""),
    ]


WRITTEN = """\
# ours
version = 2
[ethernet]
rate = "25Gb/s"      # measured

[[cluster]]
nodes = [            # rack 7
  "a[0-1]",          # ] not the end
]
kind = "ib"
name = 'mine'        # a name of our own
rate = "200Gb/s"     # not what the label says
processes = 8
include = ["mlx5_[0-3]"]

[[cluster]]
name = "old"
kind = "roce"
rate = "100Gb/s"
nodes = ["z0"]
"""


def test_what_a_person_wrote_stays():
    spec = parse_spec(WRITTEN)
    more, new = write.split(spec, [*FULL, FoundCluster("old", ("o1",), 8, "ib", "", 10**9)])
    assert more == {"mine": ("a2",)} and [c.name for c in new] == ["b", "old-2"]
    text = write.merged(WRITTEN, "c.toml", more, new)
    after = parse_spec(text)
    assert [(c.name, c.nodes) for c in after.clusters] == [
        ("mine", ("a0", "a1", "a2")),
        ("old", ("z0",)),
        ("b", ("b0",)),
        ("old-2", ("o1",)),
    ]
    assert after.clusters[0].rate_bps == 200 * 10**9 and after.clusters[0].include == (
        "mlx5_[0-3]",
    )
    assert text.replace('"a[0-1]", "a2"', '"a[0-1]",').startswith(WRITTEN)
    more, new = write.split(after, FULL)
    assert not more and not new and write.merged(text, "c.toml", more, new) == text


@pytest.mark.parametrize(
    "nodes",
    [
        'nodes = ["a0", "a1"]',
        'nodes=["a0","a1",]',
        'nodes = [\n"a0", # x\n"a1" # y ]\n]',
        "nodes = ['a0', 'a1']  # ] here",
    ],
)
def test_lists_as_people_write_them(nodes):
    text = f'version = 2\n[ethernet]\nrate = "1Gb/s"\n[[cluster]]\nname = "x"\nkind = "ethernet"\n{nodes}\n'
    merged = write.merged(text, "c.toml", {"x": ("b7", "b8")}, [])
    assert parse_spec(merged).clusters[0].nodes == ("a0", "a1", "b7", "b8") and len(merged) > len(
        text
    )


def test_what_cannot_be_added_safely_is_told():
    text = (
        'version = 2\ncluster = [{name = "x", kind = "ethernet", nodes = ["a0"]}]\n[ethernet]\nrate = '
        '"1Gb/s"\n'
    )
    with pytest.raises(HolmesError, match="add b7 there yourself"):
        write.merged(text, "c.toml", {"x": ("b7",)}, [])


def test_a_topology_may_be_empty():
    assert Topology((), "t").fabric_of == {}
    assert parse_topology("# none\nBlockSizes=18\n", "t").fabric_of == {}


def test_the_public_files_are_what_schedulers_print():
    for file in PUBLIC.glob("*.json"):
        document = json.loads(file.read_text())
        assert document["kind"] in ("List", "Node")
