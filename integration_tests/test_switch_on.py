"""Tests every way to switch holmes on, and every bad input, with an unmodified script.

The script makes process groups in every way of torch, on two emulated clusters.
"""

import json
import sys
from pathlib import Path

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from integration_tests.jobs import CLUSTER, SCRIPTS, full, same, some

GROUPS = str(SCRIPTS / "groups.py")
FLAGS = ("--holmes", "--holmes-cluster", str(CLUSTER))


def test_stock_is_stock(two_clusters):
    before = two_clusters.lab.counters()
    lines = two_clusters.json(two_clusters.run(GROUPS))
    assert [line["node"] for line in lines] == ["a0", "b0", "a1", "b1"]
    assert not any(line["holmes"] for line in lines)
    for nics in two_clusters.sent(before).values():
        fast_mb = max(mb for nic, mb in nics.items() if nic != "eth0")
        assert nics["eth0"] > 7 and fast_mb < 0.01


def assert_planned(two_clusters, lines, sent):
    """Assert that ranks, sums and traffic of a job of groups.py are those that holmes plans."""
    assert [line["node"] for line in lines] == ["a0", "a1", "b0", "b1"]
    assert [line["env"] for line in lines] == [0, 1, 2, 3] == [line["rank"] for line in lines]
    assert all(line["local"] == "0" for line in lines)
    for line in lines:
        inside = 1.0 if line["rank"] < 2 else 5.0
        assert line["sums"] == {
            "world": 6.0,
            "new_group": inside,
            "new_subgroups": inside,
            "mesh": inside,
        }
    # 4 all-reduces of 2 MB over 2 ranks: 8 MB on the fast NIC of every node, hardly anything on Ethernet
    for node, nics in sent.items():
        fast = "ib0" if node.startswith("a") else "roce0"
        assert nics[fast] > 7 and nics["eth0"] < 0.5, (node, nics)


@pytest.mark.parametrize(
    "how",
    # some(): of these, only "flag" and "enable()" run before every merge.
    [
        *some(
            ["flag", "flag without a file", "enable()", "mpirun's variables"], "flag", "enable()"
        ),
        # row: the entry of README's table of jobs that the case tests. full:
        # rows/test_rows.py trains so, too.
        pytest.param("HOLMES=1", marks=[pytest.mark.row("a launcher that takes no flags"), full]),
        pytest.param(
            "python -m holmes_ext",
            marks=[pytest.mark.row("a Python that ignores .pth files"), full],
        ),
    ],
)
def test_every_way_to_switch_on(two_clusters, tmp_path, how):
    """Holmes is on for all ranks of a script that does not import it, however the user switches it on."""
    before = two_clusters.lab.counters()  # bytes that each NIC has sent
    # GROUPS: a script that does not import holmes. FLAGS: the flags that switch holmes on.
    if how == "flag":
        result = two_clusters.run(
            "sh", "-c", f"exec {sys.executable} {GROUPS} --lr 1 {' '.join(FLAGS)}"
        )
    elif how == "flag without a file":
        result = two_clusters.run(GROUPS, "--lr", "1", "--holmes")
    elif how == "HOLMES=1":
        result = two_clusters.run(
            GROUPS, "--lr", "1", env={"HOLMES": "1", "HOLMES_CLUSTER": str(CLUSTER)}
        )
    elif how == "python -m holmes_ext":
        result = two_clusters.run(
            "sh", "-c", f"exec {sys.executable} -m holmes_ext {GROUPS} --lr 1"
        )
    elif how == "mpirun's variables":
        # The job's processes have torchrun's variables. They are replaced by those that mpirun sets.
        values = ("RANK=$RANK", "SIZE=$WORLD_SIZE", "LOCAL_RANK=0", "LOCAL_SIZE=1")
        names = " ".join(f"OMPI_COMM_WORLD_{value}" for value in values)
        unset_torchruns = (
            "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u LOCAL_SIZE"
        )
        command = f"exec {unset_torchruns} {names} {sys.executable} {GROUPS} --lr 1 --holmes"
        result = two_clusters.run("sh", "-c", command)
    else:
        script = tmp_path / "enabled.py"
        script.write_text(
            f"import holmes_ext\nholmes_ext.enable(cluster={str(CLUSTER)!r})\n"
            + Path(GROUPS).read_text()
        )
        result = two_clusters.run(str(script), "--lr", "1")
    # Each rank printed the arguments that the script saw, without holmes's flags, and whether holmes is on.
    lines = two_clusters.json(result)
    for line in lines:
        assert line["argv"] == ["--lr", "1"]
        assert line["holmes"]
    assert_planned(two_clusters, lines, two_clusters.sent(before))
    messages = [
        line
        for output in result.outputs.values()
        for line in output.splitlines()
        if line.startswith("holmes:")
    ]
    assert len(messages) == 1
    assert "2 clusters" in messages[0]
    assert "ranks renumbered" in messages[0]


def test_torchrun_with_its_own_store(two_clusters):
    """The job uses the store of torchrun's agents, and rank 0 need not be on the store's host.

    There is one agent on each node.
    """
    torchrun = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 --node-rank $NODE_RANK"
        f" --master-addr $MASTER_ADDR --master-port $MASTER_PORT {GROUPS} --holmes --holmes-plan $PLAN"
    )
    site = site_from_spec(load_spec(CLUSTER))
    plan = build_plan(site, Sizes(pipeline=2))
    nodes = (*plan.nodes[2:], *plan.nodes[:2])  # rank 0 on b0, while MASTER_ADDR is a0
    path = two_clusters.lab.directory / "plan.json"
    from dataclasses import replace

    replace(plan, nodes=nodes).save(path)
    result = two_clusters.run(
        "sh", "-c", torchrun, env={"PLAN": str(path), "HOLMES_CLUSTER": str(CLUSTER)}
    )
    lines = two_clusters.json(result)
    assert [line["node"] for line in lines] == ["b0", "b1", "a0", "a1"]


@full  # rows/test_rows.py trains with this launcher in each landing
def test_deepspeeds_launcher(two_clusters):
    """The ranks are started as by `deepspeed --hostfile`: deepspeed.launcher.launch on every node.

    The launcher adds --local_rank.
    """
    import base64

    world = base64.urlsafe_b64encode(
        json.dumps({node: [0] for node in two_clusters.order}).encode()
    ).decode()
    command = (
        f"exec {sys.executable} -m deepspeed.launcher.launch --world_info={world} --node_rank=$NODE_RANK"
        f" --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT {GROUPS} {' '.join(FLAGS)}"
    )
    before = two_clusters.lab.counters()
    clean = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK; "
    result = two_clusters.run("sh", "-c", clean + command, env={"DS_ACCELERATOR": "cpu"})
    lines = [
        json.loads(line)
        for output in result.stdout.values()
        for line in output.splitlines()
        if line.startswith('{"rank"')
    ]
    assert result.returncode == 0, result.outputs
    assert_planned(
        two_clusters, sorted(lines, key=lambda line: line["rank"]), two_clusters.sent(before)
    )


def test_a_users_own_variable_wins(two_clusters):
    before = two_clusters.lab.counters()
    result = two_clusters.run(GROUPS, *FLAGS, env={"GLOO_SOCKET_IFNAME": "eth0"})
    assert result.returncode == 0
    assert "GLOO_SOCKET_IFNAME=eth0 was set by you and stays" in "".join(result.outputs.values())
    assert all(nics["eth0"] > 7 for nics in two_clusters.sent(before).values())


def test_holmes_disable_runs_stock_placement_of_nics(two_clusters):
    before = two_clusters.lab.counters()
    result = two_clusters.run(GROUPS, *FLAGS, env={"HOLMES_DISABLE": "nics"})
    assert [line["node"] for line in two_clusters.json(result)] == ["a0", "a1", "b0", "b1"]
    assert all(nics["eth0"] > 7 for nics in two_clusters.sent(before).values())


TOML = CLUSTER.read_text()
BAD_FILES = {
    "missing": (None, ["cannot be read"]),
    "empty": ("", ["the file is empty"]),
    "truncated": (TOML[:-30], ["not valid TOML"]),
    "contradictory": (
        TOML.replace('kind = "roce"', 'kind = "roce"\nfabric = "a"'),
        ["key 'cluster.b.fabric'"],
    ),
    "node in two clusters": (
        TOML.replace("b[0-1]", "a[1-2]"),
        ["node 'a1' is already in cluster 'a'"],
    ),
    "node that reports and is not in the file": (
        TOML.replace("b[0-1]", "b[0-0]"),
        ["node 'b1' reported but is in no cluster"],
    ),
    "wrong kind": (
        TOML.replace('kind = "roce"', 'kind = "ib"'),
        ["node 'b0' of cluster 'b' has no ib NIC that is up"],
    ),
    "processes": (
        TOML.replace("processes = 1", "processes = 2"),
        ["'cluster.a.processes' is 2, but node 'a0' started 1"],
    ),
    "NIC that does not exist": (TOML + 'include = ["mlx5_7"]\n', ["node 'b0'", "mlx5_7"]),
    "interface that does not exist": (
        TOML + '[node.a0]\nethernet = "eth7"\n',
        ["node 'a0' has no interface 'eth7'"],
    ),
    "unknown key": (TOML + "layers = 3\n", ["key 'cluster.b.layers' is not known"]),
}


def assert_one_line(result, parts):
    """Assert that all ranks end with status 2 and together print one line with these parts."""
    lines = [
        line
        for output in result.outputs.values()
        for line in output.splitlines()
        if "socket.cpp" not in line and line.strip()  # torch warns about sockets
    ]
    assert set(result.statuses.values()) == {2}, result.outputs
    assert len(lines) == 1 and lines[0].startswith("holmes: "), lines
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.parametrize(
    "case",
    some(
        BAD_FILES,
        "node in two clusters",
        "node that reports and is not in the file",
        "NIC that does not exist",
    ),
)
def test_bad_cluster_file(two_clusters, tmp_path, case):
    text, parts = BAD_FILES[case]
    file = tmp_path / "c.toml"
    if text is not None:
        file.write_text(text)
    assert_one_line(
        two_clusters.run(GROUPS, "--holmes", "--holmes-cluster", str(file)), ["c.toml", *parts]
    )


def edited(plan, **changes):
    """Return the JSON of a plan with some keys changed."""
    document = json.loads(plan.to_json())
    document.update(changes)
    return json.dumps(document)


@pytest.mark.parametrize(
    "case",
    some(
        ["other cluster", "other world size", "edited by hand", "not JSON", "missing"],
        "edited by hand",
    ),
)
def test_bad_plan_file(two_clusters, tmp_path, case):
    site = site_from_spec(load_spec(CLUSTER))
    good = build_plan(site, Sizes(pipeline=2))
    if case == "other cluster":
        other = TOML.replace("2Gb/s", "4Gb/s")
    else:
        other = TOML.replace("processes = 1", "processes = 2")
    (tmp_path / "other.toml").write_text(other)
    planned = build_plan(site_from_spec(load_spec(tmp_path / "other.toml")), Sizes(pipeline=2))
    file = tmp_path / "p.json"
    texts = {
        "other cluster": planned.to_json(),
        "other world size": planned.to_json(),
        "not JSON": good.to_json()[:-9],
        "edited by hand": edited(good, nodes=["b0", "a0", "a1", "b1"]),
    }
    if case in texts:
        file.write_text(texts[case])
    parts = {
        "other cluster": "site_digest",
        "other world size": "world size 8 in the plan, 4 here",
        "edited by hand": "edited",
        "not JSON": "not valid JSON",
        "missing": "cannot be read",
    }[case]
    assert_one_line(two_clusters.run(GROUPS, *FLAGS, "--holmes-plan", str(file)), ["p.json", parts])


@pytest.mark.parametrize(
    "flags, parts",
    [
        pytest.param(["--holmes"], ["--holmes is given twice"], marks=full),
        (["--holmes-clutser=x"], ["did you mean --holmes-cluster"]),
        pytest.param(
            ["--holmes-sizes=pipeline=3"],
            ["pipeline 3", "does not divide the world size 4"],
            marks=full,
        ),
        (
            ["--pipeline-model-parallel-size", "3"],
            ["pipeline 3", "does not divide the world size 4"],
        ),
        pytest.param(
            ["--holmes-require=deepspeed-p2q"],
            ["deepspeed-p2q", "did you mean 'deepspeed-p2p'"],
            marks=full,
        ),
    ],
)
def test_bad_flags(two_clusters, flags, parts):
    assert_one_line(two_clusters.run(GROUPS, *FLAGS, *flags), parts)


@pytest.mark.parametrize(
    "change, parts",
    [
        (
            "--holmes-timeout 77",
            ["disagree on timeout", "rank 0 on a0 has '300'", "rank 2 on a1 has '77'"],
        ),
        ("--holmes-cluster other.toml", ["rank 2 on a1: other.toml", "cannot be read"]),
        pytest.param(
            "--holmes-clutser x",
            ["rank 2 on a1: --holmes-clutser", "did you mean --holmes-cluster"],
            marks=full,
        ),
        pytest.param("", [], marks=full),
    ],
)
def test_ranks_that_were_given_different_flags(two_clusters, change, parts):
    flags = "--holmes"
    if not change.startswith("--holmes-cluster"):
        flags += f" --holmes-cluster {CLUSTER}"
    command = f"[ $RANK = 2 ] && more='{change}'; exec {sys.executable} {GROUPS} {flags} $more"
    result = two_clusters.run("sh", "-c", command)
    if change:
        assert_one_line(result, parts)
    else:
        assert result.returncode == 0


@pytest.fixture
def deepspeed_from_the_future(tmp_path):
    """Return a folder for PYTHONPATH whose metadata say that deepspeed 0.99.0 is installed."""
    info = tmp_path / "deepspeed-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.99.0\n")
    return str(tmp_path)


def test_an_unsupported_framework_switches_its_features_off_and_training_goes_on(
    two_clusters, deepspeed_from_the_future
):
    result = two_clusters.run(GROUPS, *FLAGS, env={"PYTHONPATH": deepspeed_from_the_future})
    assert [line["node"] for line in two_clusters.json(result)] == ["a0", "a1", "b0", "b1"]
    said = [
        line
        for output in result.outputs.values()
        for line in output.splitlines()
        if "not patched: deepspeed-p2p" in line
    ]
    assert len(said) == 1 and "deepspeed 0.99.0 is not supported (needs" in said[0], result.outputs


def test_an_unsupported_framework_stops_the_job_that_asked_for_it_by_name(
    two_clusters, deepspeed_from_the_future
):
    result = two_clusters.run(
        GROUPS,
        *FLAGS,
        "--holmes-require",
        "deepspeed-p2p",
        env={"PYTHONPATH": deepspeed_from_the_future},
    )
    assert_one_line(
        result, ["feature deepspeed-p2p cannot be used: deepspeed 0.99.0 is not supported"]
    )


def test_a_rank_without_holmes_is_named(two_clusters):
    command = f"[ $RANK != 3 ] && more='--holmes --holmes-timeout 6'; exec {sys.executable} {GROUPS} $more"
    result = two_clusters.run("sh", "-c", command, timeout=60)
    assert result.returncode == 2
    assert any(
        "1 of 4 ranks did not report within 6 s: rank 3" in output
        for output in result.outputs.values()
    ), result.outputs


def test_a_fast_nic_that_is_down(two_clusters):
    two_clusters.lab.set_link("b1", "roce0", up=False)
    try:
        result = two_clusters.run(GROUPS, *FLAGS, "--holmes-fallback", "fail")
        assert_one_line(result, ["node 'b1' of cluster 'b' has no roce NIC that is up", "mlx5_0:1"])
    finally:
        two_clusters.lab.set_link("b1", "roce0", up=True)


def test_sharded_by_torch_itself(two_clusters, tmp_path, capsys):
    """FSDP2 over a DeviceMesh gathers weights on the fast NICs, and its losses do not change."""
    script = str(SCRIPTS / "sharded.py")
    before = two_clusters.lab.counters()
    stock = two_clusters.json(two_clusters.run(script, env={"GLOO_SOCKET_IFNAME": "eth0"}))
    on_ethernet = two_clusters.sent(before)
    before = two_clusters.lab.counters()
    lines = two_clusters.json(two_clusters.run(script, *FLAGS, "--holmes-telemetry", str(tmp_path)))
    sent = two_clusters.sent(before)
    assert [line["node"] for line in lines] == ["a0", "a1", "b0", "b1"]
    losses = lines[0]["losses"]
    assert same(losses, stock[0]["losses"]) and losses[-1] != losses[0]
    for node, nics in sent.items():
        fast = "ib0" if node.startswith("a") else "roce0"
        assert nics["eth0"] < 0.5 * on_ethernet[node]["eth0"] and nics[fast] > nics["eth0"], (
            node,
            nics,
            on_ethernet[node],
        )
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)["rows"]} - {"world"} == {
        "data"
    }
