"""The lab for real: namespaces, links, jobs, and that nothing is left however it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.lab import Lab, state

TOML = """
version = 1
[ethernet]
rate = "400Mb/s"
[[cluster]]
name = "a"
kind = "ib"
rate = "2Gb/s"
nodes = ["a0", "a1"]
[[cluster]]
name = "b"
kind = "roce"
rate = "1Gb/s"
nodes = ["b0"]
"""
SPEC = parse_spec(TOML)
PATIENCE = 60.0  # seconds that a busy machine may take; nothing here asserts how fast something is


@pytest.fixture(scope="module")
def lab():
    with Lab(SPEC) as lab:
        yield lab


def python(code, *arguments):
    return [sys.executable, "-c", code, *arguments]


def eventually(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def marked(marker):
    """Pids, in any namespace, of processes with `marker` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def cli(*arguments, toml, **options):
    """`holmes lab` as a process of its own, which heeds Ctrl-C also where the tests themselves run in the background.
    """
    words = [str(toml) if word == "FILE" else word for word in arguments]
    command = ["env", "--default-signal=INT", sys.executable, "-m", "holmes_ext.cli.main", "lab", *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    return path


def test_each_node_is_a_machine_of_its_own(lab):
    code = """
import json, os, socket
name = socket.gethostname()
print(json.dumps([name, socket.gethostbyname(name), sorted(os.listdir("/sys/class/net")),
    [socket.gethostbyname(n) for n in ("a0", "a1", "b0")], os.listdir("/dev/shm"), os.path.exists(f"/proc/{os.getpid()}")]))
"""
    result = lab.run(python(code))
    assert result.returncode == 0, result.outputs
    reports = [json.loads(result.stdout[rank]) for rank in range(3)]
    everyone = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert reports[0] == ["a0", "10.77.0.1", ["eth0", "ib0", "lo"], everyone, [], True]
    assert reports[2] == ["b0", "10.77.0.3", ["eth0", "lo", "roce0"], everyone, [], True]


def test_torchruns_environment(lab):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK NODE_RANK MASTER_ADDR OMP_NUM_THREADS".split()
    code = f"import os, json; print(json.dumps([os.environ[n] for n in {names}] + [os.environ['HOLMES_LAB_NODE']]))"
    result = lab.run(python(code), order=["b0", "a1"], processes=2)
    reports = [json.loads(result.stdout[rank]) for rank in range(4)]
    assert reports[0] == ["0", "0", "4", "2", "2", "0", "0", "10.77.0.3", "1", "b0"]
    assert reports[3] == ["3", "1", "4", "2", "2", "1", "1", "10.77.0.3", "1", "a1"]
    assert not result.emulated and result.first_failed is None


def test_the_sysfs_tree_is_named_and_readable(lab):
    code = "import os; print(open(os.environ['HOLMES_SYSFS'] + '/class/infiniband/mlx5_0/ports/1/link_layer').read())"
    result = lab.run(python(code))
    assert [result.stdout[rank].strip() for rank in range(3)] == ["InfiniBand", "InfiniBand", "Ethernet"]


TRANSFER = """
import os, socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
if os.environ["RANK"] == "0":
    for _ in range(400):
        try:
            s = socket.create_connection((address, 7000), timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    start = time.monotonic()
    s.sendall(bytes(size)); s.recv(1)
    print(time.monotonic() - start)
else:
    c, _ = socket.create_server((address, 7000)).accept()
    while size > 0:
        size -= len(c.recv(1 << 16))
    c.sendall(b"x")
"""


def transfer(lab, one, two, nic, size):
    """Seconds for `size` bytes from node `one` to `two` over `nic`, and bytes sent by `one`'s and received by `two`'s.
    """
    before = lab.counters()
    result = lab.run(python(TRANSFER, lab._node(two).nic(nic).address, str(size)), order=[one, two], timeout=PATIENCE)
    assert result.returncode == 0, result.outputs
    after = lab.counters()
    sent, received = after[one][nic][1] - before[one][nic][1], after[two][nic][0] - before[two][nic][0]
    return float(result.stdout[0]), sent, received


def test_fabrics_are_apart_and_ethernet_reaches_all(lab):
    size = 1_000_000
    for one, two, nic in (("a0", "a1", "ib0"), ("a0", "b0", "eth0")):
        before = lab.counters()
        _, sent, received = transfer(lab, one, two, nic, size)
        assert size < sent < 1.2 * size and size < received < 1.2 * size
        other = "eth0" if nic == "ib0" else "ib0"
        assert lab.counters()[one][other] == before[one][other]
    code = "import socket, sys; s = socket.socket(); s.settimeout(2); sys.exit(s.connect_ex((sys.argv[1], 7000)) == 0)"
    result = lab.run(python(code, lab._node("b0").nic("roce0").address), order=["a0"])
    assert result.returncode == 0


def test_links_are_shaped_and_rates_can_be_changed(lab):
    """A busy machine makes a transfer slower, never faster: so only the lower bound of its time is asserted."""
    size = 2_000_000
    seconds, _, _ = transfer(lab, "a0", "b0", "eth0", size)
    assert seconds > 0.85 * size * 8 / 400e6
    try:
        lab.set_rate("b0", "eth0", 40_000_000)
        seconds, _, _ = transfer(lab, "a0", "b0", "eth0", size)
        assert seconds > 0.85 * size * 8 / 40e6  # shaped where b0 receives
        seconds, _, _ = transfer(lab, "b0", "a0", "eth0", size)
        assert seconds > 0.85 * size * 8 / 40e6  # and where it sends
    finally:
        lab.set_rate("b0", "eth0", 400_000_000)


def test_a_pulled_cable_is_seen_by_the_node(lab):
    code = "import os; print(open('/sys/class/net/ib0/carrier').read().strip(), os.environ['HOLMES_SYSFS'])"
    lab.set_link("a1", "ib0", up=False)
    try:
        result = lab.run(python(code), order=["a1"])
        carrier, tree = result.stdout[0].split()
        assert carrier == "0" and Path(tree, "class/infiniband/mlx5_0/ports/1/state").read_text() == "1: DOWN\n"
    finally:
        lab.set_link("a1", "ib0", up=True)
    assert lab.run(python(code), order=["a1"]).stdout[0].startswith("1 ")


FAIL = "import os, sys, time\nif os.environ['RANK'] == '1': {}\ntime.sleep(600)"


@pytest.mark.parametrize("end, status", [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)])
def test_when_a_rank_fails_the_others_are_ended(lab, end, status):
    result = lab.run(python(FAIL.format(end)), grace=0.1, timeout=PATIENCE)
    assert result.returncode == status and result.first_failed == 1
    assert result.statuses == {0: 143, 1: status, 2: 143}


def test_a_rank_that_ignores_sigterm_is_killed(lab):
    code = "import signal; signal.signal(15, signal.SIG_IGN)\n" + FAIL.format("sys.exit(3)")
    result = lab.run(python(code), grace=1.0, timeout=PATIENCE)
    assert result.returncode == 3 and result.statuses[0] == 137


def test_others_that_end_by_themselves_in_time_keep_their_status(lab):
    result = lab.run(python("import os, sys, time; time.sleep(0.3 * (os.environ['RANK'] != '1')); sys.exit(5)"), grace=PATIENCE)
    assert result.statuses == {0: 5, 1: 5, 2: 5} and result.first_failed == 1


def test_timeout(lab):
    result = lab.run(python("import time; time.sleep(600)"), timeout=0.5)
    assert result.returncode == 124 and result.first_failed is None


def test_a_command_that_does_not_exist(lab):
    result = lab.run(["/no/such/command"])
    assert result.returncode == 127 and "/no/such/command" in result.outputs[0]


def test_what_a_rank_leaves_running_ends_with_the_job(lab):
    marker = f"stray-{os.getpid()}"
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]"
    code += ", start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    assert lab.run(python(code, marker)).returncode == 0
    assert marked(marker) == []


def test_start_poll_kill(lab):
    lines = []
    job = lab.start(
        python("import time; print('up', flush=True); time.sleep(600)"), on_line=lambda *line: lines.append(line), grace=0.1
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
print(json.dumps([sys.argv, sys.path[0], __name__, socket.gethostname(), os.environ["RANK"], "decimal" in sys.modules]))
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
        one, two = json.loads(plain.stdout[rank]), json.loads(forked.stdout[rank])
        assert one[:-1] == two[:-1] and (one[-1], two[-1]) == (False, True)
    assert len({forked.outputs[rank].split()[-1] for rank in range(3)}) == 3, "each rank has its own random state"
    assert lab.run([sys.executable, "script.py", "fail"], cwd=tmp_path, preload=("decimal",)).returncode == 4
    assert lab.run([sys.executable, "-m", "script", "x"], cwd=tmp_path, preload=("decimal",)).returncode == 0


@pytest.mark.parametrize(
    "command, modules, message",
    [(["bash"], ("json",), "python SCRIPT"), ([sys.executable, "x.py"], ("no_such_module",), "no_such_module")],
)
def test_a_preload_that_cannot_be(lab, command, modules, message):
    with pytest.raises(HolmesError, match=message):
        lab.run(command, preload=modules)


@pytest.mark.parametrize("order, message", [(["a0", "z9"], "no node 'z9'"), (["a0", "a0"], "named twice"), ([], "at least one")])
def test_a_bad_order_is_refused(lab, order, message):
    with pytest.raises(HolmesError, match=message):
        lab.run(["true"], order=order)


def test_unequal_processes_are_refused():
    spec = parse_spec(TOML.replace('nodes = ["b0"]', 'nodes = ["b0"]\nprocesses = 2'))
    with Lab(spec) as lab:
        with pytest.raises(HolmesError, match="node 'a1' has 1 processes and node 'b0' has 2"):
            lab.run(["true"])
        assert lab.run(["true"], processes=1).returncode == 0


def test_the_accelerator_reaches_the_ranks_and_the_result_says_so(lab):
    code = "import os; print(os.environ['HOLMES_LAB_EMULATED'], os.environ['HOLMES_LAB_CLUSTER'])"
    result = lab.run(python(code), accelerator={"flops": 1e9, "classes": ["Block"]})
    assert result.emulated and [result.stdout[rank].strip() for rank in range(3)] == ["1 a", "1 a", "1 b"], result.outputs
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
    result = lab.run([sys.executable, str(tmp_path / "gloo.py")], preload=("torch",), timeout=2 * PATIENCE)
    assert result.returncode == 0 and result.stdout[1] == "6.0\n", result.outputs
    after = lab.counters()
    assert all(after[node]["eth0"][1] - before[node]["eth0"][1] > 1_000_000 for node in after)
    assert after["a0"]["ib0"][1] - before["a0"]["ib0"][1] < 10_000


def test_two_labs_side_by_side(lab):
    with Lab(SPEC) as other:
        job = lab.start(python("import socket, time; socket.create_server(('', 7777)); time.sleep(600)"), order=["a0"])
        mine = other.run(python("import socket; socket.create_server(('', 7777)); print(socket.gethostname())"), order=["a0"])
        assert mine.stdout[0] == "a0\n" and job.poll() is None
        job.kill()
        job.wait(PATIENCE)
    assert lab.run(["true"]).returncode == 0


def test_everything_is_gone_after_close():
    with Lab(SPEC) as lab:
        directory, holder = lab.directory, lab.holder("a0")
        assert Path(f"/proc/{holder}/ns/net").exists()
        job = lab.start(python("import time; time.sleep(600)"))
        pids = job.pids
    assert not directory.exists() and not any(Path(f"/proc/{pid}").exists() for pid in [holder, *pids.values()])


@pytest.mark.parametrize("preload", [[], ["--preload", "json"]])
def test_sigkill_of_the_lab_leaves_nothing(toml, tmp_path, preload):
    marker = f"killed-{os.getpid()}-{len(preload)}"
    (tmp_path / "s.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    command = [sys.executable, str(tmp_path / "s.py"), marker]
    process = cli("run", "--cluster", "FILE", *preload, "--", *command, toml=toml)
    assert process.stdout.readline().endswith("up\n")
    (directory,) = (path for path in state.directories() if f"-{process.pid}-" in path.name)
    keeper = json.loads((directory / "state.json").read_text())["keeper"][0]
    process.kill()
    process.wait()
    eventually(lambda: not marked(marker) and not Path(f"/proc/{keeper}").exists(), "the kernel ends every process")
    eventually(lambda: not directory.exists(), "the keeper removes the files")


def test_ctrl_c_ends_all_and_exits_130(toml):
    marker = f"interrupted-{os.getpid()}"
    process = cli("run", "--cluster", "FILE", "--", *python("import time; print('up', flush=True); time.sleep(600)", marker), toml=toml)
    assert process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in errors
    assert marked(marker) == [] and not any(f"-{process.pid}-" in path.name for path in state.directories())


def test_down_ends_an_orphaned_lab_and_leaves_one_in_use_alone(lab, toml):
    marker = f"orphan-{os.getpid()}"
    process = cli("run", "--cluster", "FILE", "--", *python("import time; print('up', flush=True); time.sleep(600)", marker), toml=toml)
    assert process.stdout.readline().endswith("up\n")
    (directory,) = (path for path in state.directories() if f"-{process.pid}-" in path.name)
    keeper = json.loads((directory / "state.json").read_text())["keeper"][0]
    os.kill(keeper, signal.SIGSTOP)  # it cannot see that its caller dies
    process.kill()
    process.wait()
    holders = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    assert len(holders) >= 4 and directory.exists()  # three nodes and the switch: the network is still there
    down = cli("down", "--json", toml=toml)
    out, errors = down.communicate(timeout=PATIENCE)
    assert down.returncode == 0, errors
    found = {entry["directory"]: entry for entry in json.loads(out)}
    assert found[str(directory)]["cleared"] and found[str(directory)]["keeper_alive"]
    assert not found[str(lab.directory)]["cleared"]
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in holders), "the kernel ends every process")
    assert not marked(marker) and not directory.exists() and lab.run(["true"]).returncode == 0


def test_a_killed_keeper_is_an_error_and_not_a_hang():
    with Lab(SPEC) as lab:
        job = lab.start(python("import time; time.sleep(600)"))
        assert job.pids
        os.kill(lab._keeper.pid, signal.SIGKILL)
        with pytest.raises(HolmesError, match="keeper"):
            job.wait(PATIENCE)
        with pytest.raises(HolmesError, match="keeper"):
            lab.run(["true"])


def test_cli_prefixes_lines_and_passes_the_status_on(toml):
    process = cli("run", "--cluster", "FILE", "--interleave", "--env", "X=7", "--", "bash", "-c", "echo $X; exit $RANK", toml=toml)
    out, errors = process.communicate(timeout=PATIENCE)
    assert sorted(out.splitlines()) == ["[a0:0] 7", "[a1:0] 7", "[b0:0] 7"]
    assert process.returncode in (1, 2) and "failed first" in errors


def test_measure(toml):
    """A busy machine may make a link slower than configured (status 1), nothing makes it faster."""
    process = cli("measure", "--cluster", "FILE", "--scale", "0.1", "--json", toml=toml)
    out, errors = process.communicate(timeout=2 * PATIENCE)
    rows = json.loads(out)["rows"]
    assert {(row["link"], *row["nodes"], row["configured_bps"]) for row in rows} == {
        ("a", "a0", "a1", 200_000_000),
        ("ethernet", "a0", "b0", 40_000_000),
    }
    assert all(0 < row["ratio"] <= 1.1 for row in rows if row["counts"]), rows
    assert process.returncode == (0 if all(row["within"] for row in rows if row["counts"]) else 1), errors


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(HolmesError, match="`ip`.*iproute2"):
        Lab(SPEC)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")


BECOME_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def nobodys_python():
    """An interpreter of this version that other users may execute: a virtual environment's may lie below /root."""
    for python in (sys.executable, "/usr/bin/python3"):
        code = "import sys; print(*sys.version_info[:2])"
        done = subprocess.run([*BECOME_NOBODY, "env", "-i", python, "-I", "-c", code], capture_output=True, text=True, cwd="/")
        executable = subprocess.run([*BECOME_NOBODY, "test", "-x", python]).returncode == 0
        if executable and done.stdout.split() == [str(number) for number in sys.version_info[:2]]:
            return python
    pytest.skip(f"the user nobody may not execute {sys.executable}, and /usr/bin/python3 is another version")


def as_nobody(code, *wrapper, **env):
    root = str(Path(sys.modules["holmes_ext"].__file__).parents[1])
    packages = os.pathsep.join([root, *(path for path in sys.path if path.endswith("-packages"))])
    command = [*BECOME_NOBODY, *wrapper, nobodys_python(), "-c", code]
    full = {**os.environ, "PYTHONPATH": packages, "HOME": "/", **env}
    seen = subprocess.run([*BECOME_NOBODY, command[-3], "-c", "import holmes_ext, wrapt"], env=full, cwd="/", capture_output=True)
    if seen.returncode:
        pytest.skip(f"the user nobody may not read {root}, or the packages installed beside it")
    return subprocess.run(command, env=full, cwd="/", capture_output=True, text=True, timeout=2 * PATIENCE)


NOBODY = f"""
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.lab import Lab
try:
    with Lab(parse_spec({TOML!r})) as lab:
        result = lab.run(["bash", "-c", "hostname; cat /sys/class/net/eth0/carrier"])
        print(result.returncode, result.outputs[2].split(), sorted(lab.counters()["b0"]), lab.directory.exists())
    print(lab.directory.exists())
except HolmesError as error:
    print("HolmesError:", error)
"""


@needs_root
def test_an_ordinary_user_gets_a_user_namespace():
    done = as_nobody(NOBODY)
    if "HolmesError" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.splitlines() == ["0 ['b0', '1'] ['eth0', 'roce0'] True", "False"], done.stderr


@needs_root
def test_without_any_right_one_line_says_what_is_missing():
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all \"$@\""
    done = as_nobody(NOBODY, "unshare", "-Ur", "bash", "-c", forbid, "bash")
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert "HolmesError: the lab needs root, or user namespaces, which user.max_user_namespaces=0 forbids" in done.stdout
    assert "Traceback" not in done.stderr
