"""`holmes doctor` in this process: the command, the check of a training command, other patching libraries."""

import json
import shlex
import subprocess
import sys
import types
from pathlib import Path

import clusters
import healthy_nodes
import nics
import pytest
import ranks
from sysfs_builder import dgx_a100, ports_down

from holmes_ext.cli.main import main
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.doctor import frameworks as health
from holmes_ext.doctor.command.check import check_command
from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.doctor.nics import check_machine
from holmes_ext.errors import HolmesError
from holmes_ext.patches import Feature, Patch, all_patches
from holmes_ext.runtime.start import launcher

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/clusters/two_clusters_4.toml"


@pytest.fixture
def doctor(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        status = main(["doctor", *map(str, words)])
        return status, capsys.readouterr()

    return run


def test_a_good_node_and_a_bad_one(doctor, tmp_path):
    status, output = doctor("--sysfs", dgx_a100(tmp_path / "dgx"))
    assert status == 0 and "0 problems" in output.out
    status, output = doctor("--sysfs", ports_down(tmp_path / "down"))
    assert status in (0, 1) and "fix:" in output.out


def test_json_of_two_nodes_side_by_side(doctor, tmp_path, monkeypatch):
    for name, case in (("n0", dgx_a100), ("n1", ports_down)):
        monkeypatch.setenv("HOLMES_NODE", name)
        status, output = doctor("--sysfs", case(tmp_path / name), "--json")
        (tmp_path / f"{name}.json").write_text(output.out)
        assert json.loads(output.out)["node"]["name"] == name
    status, output = doctor("--nodes", tmp_path / "n0.json", tmp_path / "n1.json")
    assert "n0" in output.out and "n1" in output.out and "2 nodes" in output.out
    status, output = doctor("--json", "--nodes", tmp_path / "n0.json", tmp_path / "n1.json")
    assert len(json.loads(output.out)["nodes"]) == 2
    status, output = doctor("--nodes", tmp_path / "n0.json", tmp_path / "n0.json")
    assert (
        status == 2
        and output.err.count("\n") == 1
        and "two of the reports are from a node called 'n0'" in output.err
    )


def test_nics_and_variables_of_the_job_alone_are_judged(doctor, tmp_path, monkeypatch):
    """Not the front end, which cluster.toml excludes; and the variables that the command sets."""
    monkeypatch.setenv("HOLMES_NODE", "n1")
    machine = healthy_nodes.Machine(tmp_path)
    machine.roce("mlx5_0", "rdma0", "10.224.0.3/24", mtu=4220)
    machine.roce("mlx5_1", "eth0", "10.1.2.3/24", mtu=9000)
    root = machine.save()
    clusters_text = clusters.toml("c roce 400Gb/s n1", ethernet="100Gb/s")
    (tmp_path / "c.toml").write_text(clusters_text + 'exclude = ["mlx5_1"]\n')
    train = script(tmp_path)
    command = ["mpirun", "-np", "1", "-x", "NCCL_IB_HCA=mlx5_9", sys.executable, train, "--holmes"]
    status, output = doctor("--sysfs", root, "--cluster", tmp_path / "c.toml", "--", *command)
    problems = [line for line in output.out.splitlines() if line.startswith("problem: ")]
    assert status == 1 and [line for line in problems if "no such program" not in line] == [
        "problem: NCCL_IB_HCA: 'mlx5_9' names mlx5_9, which this node does not have (its HCAs: mlx5_0:1, "
        "mlx5_1:1)"
    ]
    assert 'NCCL_IB_HCA="=mlx5_0:1"' in output.out


def test_a_machine_without_gpu_and_fast_nic_is_told_so(monkeypatch):
    ethernet = (nics.ETHERNET,)
    monkeypatch.setattr("holmes_ext.doctor.nics.Path.glob", lambda *_: iter(()))
    assert [finding.about for finding in check_machine(ethernet)] == ["GPUs", "NICs"]
    assert [finding.about for finding in check_machine(ethernet, "ethernet")] == ["GPUs"]
    assert [finding.about for finding in check_machine((nics.IB,), live=False)] == []


def test_discover_and_doctor_tell_emulated_nics_alike(doctor, capsys, tmp_path, monkeypatch):
    """Inside the lab (HOLMES_SYSFS): the same NICs, and that they carry a part of what they announce."""
    monkeypatch.setenv("HOLMES_SYSFS", str(dgx_a100(tmp_path / "a0")))
    monkeypatch.setenv("HOLMES_LAB_NODE", "a0")
    monkeypatch.setenv("HOLMES_LAB_SCALE", "0.01")
    main(["discover"])
    discovered, (_, judged) = capsys.readouterr().out, doctor("--json")
    node = json.loads(judged.out)["node"]
    assert "mlx5_0:1" in discovered and "mlx5_0" in {nic["device"] for nic in node["nics"]}
    remark = "note: NICs are emulated (holmes lab); they carry 0.01 x the rates that they announce (--scale)"
    assert remark in discovered and remark in doctor()[1].out
    monkeypatch.delenv("HOLMES_LAB_NODE")
    assert "emulated" not in doctor()[1].out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--cluster", "none.toml"], "none.toml: cannot be read"),
        (["--nodes", "none.json"], "none.json: cannot be read"),
        (["--sysfs", "/proc"], "is not the root of a /sys tree"),
        (["command"], "write the command to check after --"),
        (["--", "echo", "hello"], "no training script"),
    ],
)
def test_bad_input_is_one_line(doctor, words, message):
    status, output = doctor(*words)
    assert status == 2 and message in output.err and output.err.count("\n") == 1 and not output.out


def script(tmp_path, text="import torch\n"):
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def findings(tmp_path, *arguments, launcher_words=(sys.executable,), text="import torch\n"):
    return [
        f"{f.level} {f.about}: {f.what}"
        for f in check_command(
            [*launcher_words, script(tmp_path, text), *arguments], load_spec(CLUSTER), {}
        )
    ]


def test_the_number_of_processes_on_nodes_of_different_width(tmp_path):
    """Each node has a torchrun of its own, so the number must be that of some node."""
    text = clusters.toml("a ib 2Gb/s a[0-1] processes=4", "b roce 1.6Gb/s b0 processes=8")
    spec = parse_spec(text)

    def problems(*launcher_words):
        command = [*launcher_words, script(tmp_path, "import torch\n"), "--holmes"]
        return [f.what for f in check_command(command, spec, {}) if "a0 has 4" in f.what]

    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
    assert not problems(*torchrun, "8") and not problems(*torchrun, "4")
    assert problems(*torchrun, "2")


def test_a_good_command_has_no_findings(tmp_path):
    assert findings(tmp_path, "--holmes", "--pipeline-model-parallel-size", "2") == []


def test_what_is_wrong_with_a_command(tmp_path):
    (line,) = findings(tmp_path)
    assert "--holmes is not among the script's arguments" in line
    (line,) = findings(tmp_path, "--holmes-plam", "x")
    assert "did you mean --holmes-plan?" in line
    (line,) = findings(tmp_path, "--holmes", "--pipeline-model-parallel-size", "3")
    assert (
        line.startswith("problem")
        and "for tensor 1: pipeline 1, 2, 4; or 3 or 6 processes for pipeline 3" in line
    )
    gpt = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
        " --global-batch-size 15 --pipeline-model-parallel-size 2"
    ).split()
    (line,) = findings(tmp_path, "--holmes", *gpt)
    assert "15 is not divisible by micro_batch 1 x data 2; 14 or 16 is" in line
    (line,) = findings(tmp_path, "--holmes", "--holmes-plan", str(tmp_path / "no.json"))
    assert "no.json" in line
    (line,) = findings(tmp_path, "--holmes", "--deepspeed_config", str(tmp_path / "no.json"))
    assert "cannot be read as JSON" in line
    assert any(
        "mindspeed" in line
        for line in findings(tmp_path, "--holmes", text="import mindspeed.megatron_adaptor\n")
    )
    lines = findings(
        tmp_path,
        "--holmes",
        launcher_words=("no-such-launcher", "--nnodes=5", "--nproc_per_node", "8"),
    )
    assert any("no such program" in line for line in lines) and any(
        "--nnodes: is 5, but the clusters have 4 nodes" in line for line in lines
    )
    assert any("--nproc-per-node: is 8, but node a0 has 1" in line for line in lines)
    (line,) = [
        f.what
        for f in check_command(
            [sys.executable, str(tmp_path / "gone.py"), "--holmes"], load_spec(CLUSTER), {}
        )
        if f.level == "problem"
    ]
    assert "there is no such file" in line


def test_the_script_of_a_command_line():
    assert (
        split_command(["torchrun", "--nnodes", "2", "a/train.py", "--x", "y.py"]).script
        == "a/train.py"
    )
    command = split_command(["torchrun", "-m", "holmes_ext", "train.py", "--x"])
    assert (
        command.script == "train.py"
        and "holmes_ext" in command.launcher
        and command.arguments == ("--x",)
    )
    command = split_command(["python", "-m", "my.train", "--x"])
    assert command.script == "" and command.arguments == ("--x",)
    with pytest.raises(HolmesError, match="no training script"):
        split_command(["echo"])


def test_a_command_inside_of_a_shell_is_checked(tmp_path):
    """The launcher and the flags of holmes are found in the text of the shell."""
    text = f"cd {tmp_path} && torchrun --nnodes 9 {script(tmp_path)} --holmes --holmes-sizes pipeline=3"
    words = ["bash", "-c", f"{text} 2>&1 | tee log"]
    lines = [f"{f.about}: {f.what}" for f in check_command(words, load_spec(CLUSTER), {})]
    assert not [line for line in lines if "is not among the script's arguments" in line]
    assert [line for line in lines if "pipeline=3" in line or "pipeline 3" in line]


@pytest.mark.parametrize(
    "line, is_missing",
    [
        ("{python} none.py --holmes", True),
        ("A=1 B=2 {python} none.py --holmes", True),
        ("bash -c 'cd /elsewhere; {python} none.py --holmes'", False),
        ("env apptainer exec image.sif python none.py --holmes", False),
        ("env srun --container-image=x python none.py --holmes", False),
    ],
)
def test_a_script_is_looked_for_only_where_the_command_runs_here(line, is_missing):
    words = shlex.split(line.format(python=sys.executable))
    lines = [f"{f.level} {f.about}: {f.what}" for f in check_command(words, None, {})]
    assert ("problem none.py: there is no such file" in lines) == is_missing
    assert not [line for line in lines if "there is no such program" in line]


def test_what_a_command_hides_is_a_note(tmp_path):
    words = ["bash", "-c", f"torchrun {script(tmp_path)} --holmes --lr $LR"]
    lines = [f"{f.level} {f.what}" for f in check_command(words, None, {})]
    assert "note --lr $LR has no value here" in lines
    words = "megatron sft --model Qwen/Qwen3-8B --holmes".split()
    lines = [f"{f.level} {f.what}" for f in check_command(words, None, {})]
    assert (
        "note megatron sft takes the model from a checkpoint, which holmes does not read" in lines
    )


def test_a_model_that_is_not_predicted_is_a_note(tmp_path):
    model = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    arguments = f"{model} --micro-batch-size 1 --is-hybrid-model --holmes".split()
    lines = [line for line in findings(tmp_path, *arguments) if "is not predicted" in line]
    assert len(lines) == 1 and lines[0].startswith("note the command: --is-hybrid-model: a model")


def test_code_that_runs_at_every_start_is_told(tmp_path):
    (tmp_path / "odd.pth").write_text("import odd_patcher; odd_patcher.go()\n")
    (tmp_path / "plain.pth").write_text("/some/folder\n")
    (tmp_path / "holmes_ext.pth").write_text("import holmes_ext\n")
    (tmp_path / "sitecustomize.py").write_text("")
    told = [f.about for f in health.check_patching_libraries([str(tmp_path)])]
    assert told == [str(tmp_path / "odd.pth"), str(tmp_path / "sitecustomize.py")]


def test_a_lock_that_a_killed_compiler_left_is_told(tmp_path):
    lock = tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "fused_adam" / "lock"
    assert not [*health.check_compilers({"HOME": str(tmp_path)})]
    lock.parent.mkdir(parents=True)
    lock.touch()
    folders = (
        {"HOME": tmp_path},
        {"XDG_CACHE_HOME": lock.parents[3]},
        {"TORCH_EXTENSIONS_DIR": lock.parents[1]},
    )
    for environ in folders:
        (found,) = health.check_compilers({name: str(folder) for name, folder in environ.items()})
        assert found.about == str(lock) and "fused_adam" in found.why and found.level == "problem"


def test_a_target_that_another_library_replaced_is_told(monkeypatch):
    module = types.ModuleType("frame.work")

    def own():
        pass

    def other():
        pass

    own.__module__, other.__module__ = "frame.work", "odd_patcher.core"
    module.kept, module.lost = own, other
    monkeypatch.setitem(sys.modules, "frame.work", module)
    feature = Feature("f", "torch>=1")
    patches = [
        Patch(feature, f"frame.work:{name}", "test", lambda w, i, a, k: w(*a, **k))
        for name in ("kept", "lost")
    ]
    assert [(f.about, f.what) for f in health.check_replaced_functions(patches)] == [
        ("frame.work:lost", "was replaced by odd_patcher.core")
    ]


def test_patches_that_do_not_fit_are_told_once_with_what_would_switch_them_on():
    patches = all_patches()
    told = [*health.check_patches(health.Fit(patch, "9.9", "off", "too new") for patch in patches)]
    assert [one.about for one in told] == [
        f"{name} 9.9" for name in dict.fromkeys(patch.feature.requirement.name for patch in patches)
    ]
    assert "ddp, fsdp, torch-schedule, pipelining" in told[0].what and "too new" in told[0].what
    assert "torch 2.6.0 to 2.15.0 have them: pip install 'torch>=2." in told[0].mend
    # Each patch has its own reason. Two features may patch the same function.
    fits = [
        health.Fit(patch, "1", "off", f"{patch.feature.name} {patch.target}")
        for patch in patches[:9]
    ]
    alone = list(health.check_patches(fits))
    assert len(alone) == len({patch.feature for patch in patches[:9]}), "a feature is told once"
    assert not [*health.check_patches(health.Fit(patch, "1", "fits", None) for patch in patches)]
    assert not [
        *health.check_patches(health.Fit(patch, None, "off", "not installed") for patch in patches)
    ]


def test_an_import_that_fails_in_several_lines_is_one_finding(tmp_path, monkeypatch):
    """As transformers' do."""
    (tmp_path / "broken_framework.py").write_text(
        "raise RuntimeError('Failed to import:\\nno Triton')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    patch = Patch(
        Feature("f", "torch>=2"), "broken_framework:f", "test", lambda w, i, a, k: w(*a, **k)
    )
    (told,) = health.check_patches([health.fit_of(patch, check=True)])
    assert told.what == "RuntimeError while importing broken_framework: Failed to import: no Triton"


def test_nodes_meet_through_a_launchers_variables(tmp_path):
    """Two processes as srun would start them; rank 0 prints both."""
    store, environ = ranks.hosted_store()
    base = {
        **environ,
        "PATH": "/usr/bin:/bin",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        "-m",
        "holmes_ext.cli.main",
        "doctor",
        "--sysfs",
        str(dgx_a100(tmp_path / "dgx")),
    ]
    processes = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "HOLMES_NODE": f"n{rank}"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    # Status 1: both have the default InfiniBand prefix, so a job without a cluster.toml would end.
    assert [process.returncode for process in processes] == [1, 0], outputs
    assert "which does not tell one fabric from two" in outputs[0][0]
    assert (
        "n0" in outputs[0][0]
        and "n1" in outputs[0][0]
        and "2 nodes" in outputs[0][0]
        and not outputs[1][0]
    )
    del store
    assert launcher.detect({}).world_size == 1
