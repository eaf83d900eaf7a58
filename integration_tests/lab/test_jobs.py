"""Tests jobs in the lab: how they end, what they print, and ranks forked from a preloaded Python."""

import json
import os
import signal
import sys
from pathlib import Path

import clusters
import pytest
from holmes_lab import Lab

from holmes_ext.errors import HolmesError
from integration_tests.lab.processes import PATIENCE, SPEC, eventually, marked, python

FAIL = "import os, sys, time\nif os.environ['RANK'] == '1': {}\ntime.sleep(600)"


@pytest.mark.parametrize(
    "end, status", [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)]
)
def test_when_a_rank_fails_the_others_are_ended(lab, end, status):
    result = lab.run(python(FAIL.format(end)), grace=0.1, timeout=PATIENCE)
    assert result.returncode == status and result.first_failed == 1
    assert result.statuses == {0: 143, 1: status, 2: 143}


def test_a_rank_that_ignores_sigterm_is_killed(lab):
    code = "import signal; signal.signal(15, signal.SIG_IGN)\n" + FAIL.format("sys.exit(3)")
    result = lab.run(python(code), grace=1.0, timeout=PATIENCE)
    assert result.returncode == 3 and result.statuses[0] == 137


def test_others_that_end_by_themselves_in_time_keep_their_status(lab):
    code = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
if os.environ["RANK"] == "1":
    sys.exit(5)
print("up", flush=True)
while True:
    signal.pause()
"""
    lines = []
    job = lab.start(python(code), on_line=lambda *line: lines.append(line), grace=PATIENCE)
    eventually(lambda: len(lines) == 2 and 1 not in job.running, "rank 1 ends first")
    job.kill(None, signal.SIGUSR1)
    result = job.wait(PATIENCE)
    assert result.statuses == {0: 5, 1: 5, 2: 5} and result.first_failed == 1


def test_timeout(lab):
    result = lab.run(python("import time; time.sleep(600)"), timeout=0.5)
    assert result.returncode == 124 and result.first_failed is None


def test_a_command_that_does_not_exist(lab):
    result = lab.run(["/no/such/command"])
    assert result.returncode == 127 and "/no/such/command" in result.outputs[0]


def test_what_a_rank_leaves_running_ends_with_the_job(lab):
    marker = f"stray-{os.getpid()}"
    code = """
import subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
    assert lab.run(python(code, marker)).returncode == 0
    assert marked(marker) == []


def test_start_poll_kill(lab):
    lines = []
    job = lab.start(
        python("import time; print('up', flush=True); time.sleep(600)"),
        on_line=lambda *line: lines.append(line),
        grace=0.1,
    )
    pids = job.pids
    assert sorted(pids) == [0, 1, 2] and job.poll() is None
    assert all(Path(f"/proc/{pid}/ns/net").exists() for pid in pids.values())
    eventually(lambda: len(lines) == 3, "three ranks print a line")
    assert sorted(lines) == [(rank, "up", "stdout") for rank in range(3)]
    with pytest.raises(TimeoutError):
        job.wait(0.1)
    job.kill(2)
    result = job.wait(PATIENCE)
    assert result.returncode == 137 and result.first_failed == 2 and job.poll() is result


def test_output_streams_logs_and_bytes_that_are_no_text(lab, tmp_path):
    code = "import os; os.write(2, b'bad \\xff'); os.write(1, b'one\\ntwo' + os.environ['RANK'].encode())"
    result = lab.run(python(code), logs=tmp_path / "logs")
    assert result.stdout[1] == "one\ntwo1\n" and "bad \ufffd\n" in result.outputs[1]
    assert sorted(os.listdir(tmp_path / "logs")) == ["rank0.log", "rank1.log", "rank2.log"]
    assert b"bad \xff\n" in (tmp_path / "logs/rank2.log").read_bytes()


SCRIPT = """
import json, os, random, socket, sys
print(json.dumps([sys.argv, sys.path[0], __name__, socket.gethostname(), \
os.environ["RANK"], "decimal" in sys.modules]))
print(random.random(), file=sys.stderr)
sys.exit(4 if sys.argv[1:] == ["fail"] else 0)
"""


def test_preloaded_ranks_are_like_fresh_ones(lab, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "x"]
    plain = lab.run(command, cwd=tmp_path)
    forked = lab.run(command, cwd=tmp_path, preload=("decimal",))
    assert plain.returncode == forked.returncode == 0, forked.outputs
    for rank in range(3):
        *plain_state, plain_has_decimal = json.loads(plain.stdout[rank])
        *forked_state, forked_has_decimal = json.loads(forked.stdout[rank])
        assert plain_state == forked_state
        assert (plain_has_decimal, forked_has_decimal) == (False, True)
    random_numbers = {forked.outputs[rank].split()[-1] for rank in range(3)}
    assert len(random_numbers) == 3  # the ranks have different random states
    failing = [sys.executable, "script.py", "fail"]
    assert lab.run(failing, cwd=tmp_path, preload=("decimal",)).returncode == 4
    as_module = [sys.executable, "-m", "script", "x"]
    assert lab.run(as_module, cwd=tmp_path, preload=("decimal",)).returncode == 0


def test_a_preloaded_rank_without_holmes_has_none_of_it(lab, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint(*(name in sys.modules for name in ('holmes_ext.job', 'torch')))\n"
        "from holmes_ext import job, patches\n"
        "print(*(sys.modules[it.__name__] is it for it in (job, patches)))"
    )
    ran = lab.run([sys.executable, str(script)], preload=("torch",), timeout=PATIENCE)
    assert ran.returncode == 0 and ran.stdout[0].split() == ["False", "True", "True", "True"], (
        ran.outputs
    )


@pytest.mark.parametrize(
    "command, modules, message",
    [
        (["bash"], ("json",), "python SCRIPT"),
        ([sys.executable, "x.py"], ("no_such_module",), "no_such_module"),
    ],
)
def test_a_preload_that_cannot_be(lab, command, modules, message):
    with pytest.raises(HolmesError, match=message):
        lab.run(command, preload=modules)


@pytest.mark.parametrize(
    "order, message",
    [(["a0", "z9"], "no node 'z9'"), (["a0", "a0"], "named twice"), ([], "at least one")],
)
def test_a_bad_order_is_refused(lab, order, message):
    with pytest.raises(HolmesError, match=message):
        lab.run(["true"], order=order)


def test_each_node_runs_the_processes_of_its_cluster():
    """The numbers are torchrun's for nodes with different numbers of processes."""
    code = "import os; print(*(os.environ[name] for name in os.sys.argv[1:]))"
    names = ("HOLMES_LAB_NODE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
    with Lab(clusters.spec("a ib 2Gb/s a0,a1", "b roce 1Gb/s b0 processes=2")) as lab:
        result = lab.run([*python(code), *names], order=("a0", "b0", "a1"))
        lines = [result.stdout[rank].strip() for rank in range(4)]
        assert lines == ["a0 0 1 0 4", "b0 0 2 1 4", "b0 1 2 1 4", "a1 0 1 2 4"], result.outputs
        assert len(lab.run(["true"], processes=1).outputs) == 3
        with pytest.raises(HolmesError, match="--processes: 0 is not 1 or more"):
            lab.run(["true"], processes=0)


def test_the_accelerator_reaches_the_ranks_and_the_result_says_so(lab):
    code = "import os; print(os.environ['HOLMES_LAB_EMULATED'], os.environ['HOLMES_LAB_CLUSTER'])"
    result = lab.run(python(code), accelerator={"flops": 1e9, "classes": ["Block"]})
    assert result.emulated
    lines = [result.stdout[rank].strip() for rank in range(3)]
    assert lines == ["1 a", "1 a", "1 b"], result.outputs
    with pytest.raises(HolmesError, match="flops"):
        lab.run(["true"], accelerator={"classes": ["Block"]})


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((250_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x[0].item())
"""


def test_gloo_uses_ethernet_without_any_variable(lab, tmp_path):
    (tmp_path / "gloo.py").write_text(GLOO)
    before = lab.counters()
    result = lab.run(
        [sys.executable, str(tmp_path / "gloo.py")], preload=("torch",), timeout=2 * PATIENCE
    )
    assert result.returncode == 0 and result.stdout[1] == "6.0\n", result.outputs
    after = lab.counters()
    assert all(after[node]["eth0"][1] - before[node]["eth0"][1] > 1_000_000 for node in after)
    assert after["a0"]["ib0"][1] - before["a0"]["ib0"][1] < 10_000


def test_two_labs_side_by_side(lab):
    with Lab(SPEC) as other:
        job = lab.start(
            python("import socket, time; socket.create_server(('', 7777)); time.sleep(600)"),
            order=["a0"],
        )
        mine = other.run(
            python("import socket; socket.create_server(('', 7777)); print(socket.gethostname())"),
            order=["a0"],
        )
        assert mine.stdout[0] == "a0\n" and job.poll() is None
        job.kill()
        job.wait(PATIENCE)
    assert lab.run(["true"]).returncode == 0
