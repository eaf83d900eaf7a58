import json
import os
import threading

import clusters
import pytest
import torch.distributed as dist
from sysfs_builder import CASES

from holmes_ext.cluster import node_report as report_module
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.maker import PlanRequest
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.start import rank as start
from holmes_ext.runtime.start.launcher import Process

FILE = clusters.toml("a ethernet - n0,n2", "b ethernet - n1,n3", ethernet="1Gb/s")
MODEL = """
version = 1
layers = 8
hidden = 1024
heads = 8
sequence = 1024
vocabulary = 1000
[training]
micro_batches = 16
[gpu]
flops = 150e9
"""


@pytest.fixture
def no_session():
    yield
    session.set_active(None)


def start_all(monkeypatch, world, options, sizes=None, failures=None):
    """Run start() of `world` ranks on a node each, in threads.

    Returns:
        the result or error of each, and its environment
    """
    store = dist.HashStore()
    monkeypatch.setattr(start, "open_store", lambda process, timeout_s: store)
    monkeypatch.setattr(start, "node_identity", lambda: threading.current_thread().name)
    monkeypatch.setattr(report_module, "node_identity", lambda: threading.current_thread().name)
    outcome = {}

    def one(rank):
        environ = {"HOLMES_NODE": f"n{rank}", "RANK": str(rank), "SLURM_PROCID": str(rank)}
        process = Process(rank, world, 0, 1, "127.0.0.1", 29500, "test")
        try:
            current, _ = start.start(
                PlanRequest(options, sizes), maker, process, {}, (failures or {}).get(rank), environ
            )
            outcome[rank] = (current, environ)
        except HolmesError as error:
            outcome[rank] = (error, environ)

    threads = [
        threading.Thread(target=one, args=(rank,), name=f"host{rank}") for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_ranks_follow_the_plan(monkeypatch, tmp_path, no_session):
    (tmp_path / "c.toml").write_text(FILE)
    outcome = start_all(
        monkeypatch, 4, Options(cluster=str(tmp_path / "c.toml")), Sizes(pipeline=2)
    )
    sessions = [outcome[rank][0] for rank in range(4)]
    assert len({current.plan.digest for current in sessions}) == 1
    for rank, (current, environ) in outcome.items():
        assert current.plan.node_of(current.rank) == f"n{rank}" == current.node.name
        assert environ["RANK"] == environ["SLURM_PROCID"] == str(current.rank)
        assert environ["LOCAL_RANK"] == "0" and environ["WORLD_SIZE"] == "4"
    assert sorted(current.rank for current in sessions) == [0, 1, 2, 3]


def test_a_partition_knows_the_gpus_of_the_cluster_file(monkeypatch, tmp_path, no_session):
    text = FILE.replace('"n0", "n2"', '"n0", "n1"').replace('"n1", "n3"', '"n2", "n3"')
    (tmp_path / "c.toml").write_text(text.replace('name = "b"', 'name = "b"\ngpu_flops = 50e9'))
    (tmp_path / "m.toml").write_text(MODEL)
    options = Options(
        cluster=str(tmp_path / "c.toml"), model=str(tmp_path / "m.toml"), partition="balanced"
    )
    outcome = start_all(monkeypatch, 4, options, Sizes(pipeline=2))
    plan = outcome[0][0].plan
    slow = plan.nodes.index("n2") // 2
    assert plan.stage_layers[slow] == 2 and sum(plan.stage_layers) == 8


def test_a_failure_of_one_rank_ends_all_with_its_words(monkeypatch, tmp_path, no_session):
    (tmp_path / "c.toml").write_text(FILE)
    outcome = start_all(
        monkeypatch,
        4,
        Options(cluster=str(tmp_path / "c.toml")),
        failures={2: HolmesError("no such thing")},
    )
    assert all(
        str(error) == "the launcher's rank 2 on n2: no such thing" for error, _ in outcome.values()
    )
    assert all(environ["RANK"] == str(rank) for rank, (_, environ) in outcome.items())


def test_a_plan_of_other_sizes_than_the_jobs(monkeypatch, tmp_path, no_session):
    from holmes_ext.cluster.site import site_from_spec
    from holmes_ext.cluster.spec import load_spec
    from holmes_ext.plan.build import build_plan

    (tmp_path / "c.toml").write_text(FILE)
    build_plan(site_from_spec(load_spec(tmp_path / "c.toml")), Sizes(pipeline=4)).save(
        tmp_path / "p.json"
    )
    options = Options(cluster=str(tmp_path / "c.toml"), plan=str(tmp_path / "p.json"))
    outcome = start_all(monkeypatch, 4, options, Sizes(pipeline=2))
    assert "p.json: key 'sizes' is pipeline=4, but the job runs pipeline=2" in str(outcome[0][0])


def test_one_process_without_a_launcher_keeps_its_environment(no_session):
    environ = {}
    current, _ = start.start(
        PlanRequest(Options()),
        maker,
        Process(0, 1, 0, 1, "127.0.0.1", 0, "no launcher"),
        {},
        None,
        environ,
    )
    assert current.rank == 0 and "RANK" not in environ and session.active() is current


def test_a_report_travels_as_json(tmp_path):
    CASES["dgx_a100"](tmp_path)
    report = report_module.report_node(
        {"HOLMES_SYSFS": str(tmp_path), "HOLMES_NODE": "x"}, "127.0.0.1"
    )
    again = report_module.NodeReport.from_dict(
        json.loads(json.dumps(report.to_dict())), processes=8
    )
    assert (again.name, again.nics, again.processes) == ("x", report.nics, 8) and len(
        report.nics
    ) > 8
    assert report.identity.endswith(str(os.stat("/proc/self/ns/net").st_ino))


def test_nics_slower_than_the_file_says_are_told(tmp_path, no_session):
    CASES["dgx_a100"](tmp_path / "sys")
    text = clusters.toml("a ib 3200Gb/s x", ethernet="1Gb/s") + 'include = ["mlx5_0"]\n'
    (tmp_path / "c.toml").write_text(text)
    environ = {"HOLMES_SYSFS": str(tmp_path / "sys"), "HOLMES_NODE": "x"}
    alone = Process(0, 1, 0, 1, "127.0.0.1", 0, "no launcher")
    _, lines = start.start(
        PlanRequest(Options(cluster=str(tmp_path / "c.toml"))), maker, alone, {}, None, environ
    )
    said = f"but the rate of fabric 'a' is 3.2 Tb/s in {tmp_path}/c.toml"
    assert lines == [
        f"node x: mlx5_0:1 runs at 200 Gb/s, {said}; the plan counts on what the file says"
    ]


def test_what_nccl_cannot_do_here_is_told_and_known_to_the_session(tmp_path, no_session):
    """A limit of NCCL on one node is in the session and in the messages.

    NCCL_IB_DISABLE is the node's, so it changes the plan. A network that a file of NCCL's forces is
    every group's.
    """
    CASES["dgx_a100"](tmp_path / "sys")
    (tmp_path / "c.toml").write_text(
        clusters.toml("a ib 200Gb/s x", ethernet="1Gb/s") + 'include = ["mlx5_0"]\n'
    )
    (tmp_path / "nccl.conf").write_text("NCCL_NET=IB\nNCCL_IB_DISABLE=1\n")
    environ = {
        "HOLMES_SYSFS": str(tmp_path / "sys"),
        "HOLMES_NODE": "x",
        "NCCL_CONF_FILE": str(tmp_path / "nccl.conf"),
    }
    alone = Process(0, 1, 0, 1, "127.0.0.1", 0, "no launcher")
    current, (line,) = start.start(
        PlanRequest(Options(cluster=str(tmp_path / "c.toml"))), maker, alone, {}, None, environ
    )
    why = f"NCCL_IB_DISABLE=1 is set in {tmp_path / 'nccl.conf'}"
    assert (
        line
        == f"node x: NCCL cannot use mlx5_0:1 for fabric 'a': {why}; its groups there go over sockets"
    )
    assert "NCCL_IB_HCA" not in environ and not current.plan.fabrics[0].verbs
    assert current.forced_nets == {"IB": f"{tmp_path / 'nccl.conf'} of node x"}
