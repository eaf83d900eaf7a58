"""Tests the flag --holmes-check, and its report for a job of one process."""

import json
import subprocess
import sys
from dataclasses import replace

import clusters
import pytest
from sysfs_builder import Sysfs, dgx_a100

from holmes_ext import _pth, extensions
from holmes_ext.cluster.site import REPORTS
from holmes_ext.errors import HolmesError
from holmes_ext.options import flag, parse_flags
from holmes_ext.planner.check.findings import Findings, GroupsOnNetwork, NetworkRate, PlacedNodes
from holmes_ext.planner.check.prediction import BetterLayout, Prediction
from holmes_ext.planner.check.report import document, show

SCRIPT = "print('FIRST STEP')"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*command):
    """Run Python with a command line, and return the finished process."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words, value, rest",
    [
        (["--holmes-check"], "on", []),
        (["--holmes-check", "data.txt", "--lr", "1"], "on", ["data.txt", "--lr", "1"]),
        (["--holmes-check=json"], "json", []),
        (["--holmes-check=out/c.json", "x"], "out/c.json", ["x"]),
        ([], "off", []),
    ],
)
def test_the_flag_needs_no_value(words, value, rest):
    options, others = parse_flags(words, {})
    assert options.value("check") == value
    assert others == rest


def test_variable():
    options, _ = parse_flags([], {"HOLMES_CHECK": "json"})
    assert options.value("check") == "json"


def test_other_values_are_refused():
    with pytest.raises(HolmesError, match="--holmes-check: 'jsn' is none of on, json, off and"):
        parse_flags(["--holmes-check=jsn"], {})


def test_a_value_without_the_equals_sign_is_refused():
    with pytest.raises(
        HolmesError, match="--holmes-check json: write --holmes-check=json; if 'json'"
    ):
        parse_flags(["--holmes-check", "json"], {})


@pytest.mark.parametrize(
    "words",
    [["json", "--holmes-check"], ["--holmes-check", "c.json"], ["--", "--holmes-check", "json"]],
)
def test_other_words_belong_to_the_script(words):
    _, others = parse_flags(words, {})
    assert others == [word for word in words if word != "--holmes-check" or "--" in words]


def test_joined_jobs_are_refused():
    options, _ = parse_flags(["--holmes-check", "--holmes-join", "a@h:1"], {})
    with pytest.raises(HolmesError, match="leave out --holmes-join"):
        extensions.load("holmes_ext.planner.check.ending:refuse_joined_jobs")(options)


def test_flags_without_a_value_are_those_of_the_extensions():
    """_pth.py may import nothing, so it repeats which flags can stand alone."""
    bare = {flag(name) for name, option in extensions.options().items() if option.bare_value}
    assert set(_pth.FLAGS_WITHOUT_VALUE) == bare


def test_script_after_the_flag_is_kept():
    argv = ["train.py", "--holmes-check", "data", "--holmes-timeout", "3", "x"]
    _pth.strip_flags(argv)
    assert argv == ["train.py", "data", "x"]


def test_job_of_one_process_ends_before_its_script(script):
    result = run(script, "--holmes-check")
    assert result.returncode == 0, result.stderr
    assert "who runs where" in result.stdout
    assert "give --holmes-model FILE" in result.stdout
    assert "FIRST STEP" not in result.stdout


def test_json_file(script, tmp_path):
    file = tmp_path / "check.json"
    result = run(script, f"--holmes-check={file}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    content = json.loads(file.read_text())
    assert content["placement"][0]["ranks"] == "0"


def test_file_that_cannot_be_written(script, tmp_path):
    result = run(script, f"--holmes-check={tmp_path}/absent/check.json")
    assert result.returncode == 2
    assert "holmes: check: " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_nic_that_is_down_is_a_problem_without_a_cluster_file(script, tmp_path, monkeypatch):
    """The node is then in no cluster with such NICs, so none of its ports has a fault."""
    tree = Sysfs(tmp_path / "sys")
    tree.hca("mlx5_0", tree.pci("0000:0c:00.0", "mlx5_core"))
    tree.ib_port("mlx5_0", prefix="fe80:0000:0000:0007", state="1: DOWN", phys="2: Polling")
    ethernet = tree.pci("0000:e2:00.0", "igb")
    tree.net("eth0", ethernet, speed=10000, addresses=["127.0.0.1/8"])
    monkeypatch.setenv("HOLMES_SYSFS", str(tree.save_addresses()))
    result = run(script, "--holmes-check")
    assert result.returncode == 1, result.stderr
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert problem.endswith("mlx5_0:1 (ib) is DOWN/Polling, so it uses Ethernet alone")


def test_nic_that_nccl_cannot_use_is_a_problem(script, tmp_path, monkeypatch):
    (tmp_path / "nccl.conf").write_text("NCCL_IB_DISABLE=1\n")
    (tmp_path / "c.toml").write_text(
        clusters.toml("a ib 200Gb/s x", ethernet="1Gb/s") + 'include = ["mlx5_0"]\n'
    )
    monkeypatch.setenv("HOLMES_SYSFS", str(dgx_a100(tmp_path / "sys")))
    monkeypatch.setenv("HOLMES_NODE", "x")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    result = run(script, "--holmes-check", "--holmes-cluster", str(tmp_path / "c.toml"))
    assert result.returncode == 1, result.stderr
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert "NCCL cannot use mlx5_0:1 for fabric 'a'" in problem


def test_holmes_switched_off_starts_the_script(script, monkeypatch):
    monkeypatch.setenv("HOLMES", "0")
    assert run(script, "--holmes-check").stdout == "FIRST STEP\n"


class _Site:
    source = "cluster.toml"
    clusters = ("a", "b")


FINDINGS = Findings(
    site=_Site(),
    sizes=None,
    placed=(PlacedNodes("0-7", "a0", "a", "0", "0-3"),),
    networks=(GroupsOnNetwork("data", 4, "a", "ethernet"),),
    rates=(NetworkRate("a - b", "link", 0, 0.02),),
    problems=("node a0, a: mlx5_0:1 is DOWN; ethernet is used instead",),
)


def test_text_with_a_problem_and_a_faster_layout(capsys):
    better = BetterLayout("P2 D4", "4 4", step_s=0.5, changes=("megatron-lm: add: --x",))
    prediction = Prediction(step_s=1.0, stock_s=1.5, worst_error=0.1, better=better)
    show("on", FINDINGS, prediction)
    lines = capsys.readouterr().out.splitlines()
    assert ["0-7", "a0", "a", "0", "0-3"] in [line.split() for line in lines]
    assert (
        "predicted step: 1 s with holmes, 1.5 s without (1.50 times as long); worst measured error of "
        "the model: 10.0%" in lines
    )
    assert any(line.startswith("faster: P2 D4, layers 4 4: 0.5 s") for line in lines)
    assert "  megatron-lm: add: --x" in lines
    assert "problem: node a0, a: mlx5_0:1 is DOWN; ethernet is used instead" in lines
    assert lines[-1] == "check: 1 problem; the job ends before its first step"


def shown(capsys, prediction, findings=FINDINGS):
    """Return the lines of a report."""
    show("on", findings, prediction)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "stock_s, answer",
    [
        (1.5, "1 s with holmes, 1.5 s without (1.50 times as long); {error}"),
        (1.05, "1 s with holmes, 1.05 s without (1.05 times as long); {error}, more than the gain"),
        (1.002, "1 s with and without holmes, which does not help this job; {error}"),
        (
            0.8,
            "1 s with holmes, 0.8 s without (0.80 times as long); {error}; holmes slows this job down: "
            "start it without holmes",
        ),
    ],
)
def test_answer_whether_holmes_helps(capsys, stock_s, answer):
    lines = shown(capsys, Prediction(step_s=1.0, stock_s=stock_s, worst_error=0.1))
    error = "worst measured error of the model: 10.0%"
    assert "predicted step: " + answer.format(error=error) in lines
    assert not any("all nodes are in one cluster" in line for line in lines)


def test_one_cluster_is_named_as_the_reason(capsys):
    site = _Site()
    site.clusters = ("a",)
    lines = shown(capsys, Prediction(step_s=1.0, stock_s=1.0), replace(FINDINGS, site=site))
    assert "all nodes are in one cluster (a), so no group crosses a slower network" in lines


@pytest.mark.parametrize("source, clusters", [("c.toml", "ab"), (REPORTS, "ab"), (REPORTS, "a")])
def test_rates_between_clusters_without_a_cluster_file(capsys, source, clusters):
    """The NICs do not show how fast the network between the clusters is."""
    site = _Site()
    site.source, site.clusters = source, tuple(clusters)
    lines = shown(capsys, Prediction(missing="no model"), replace(FINDINGS, site=site))
    assert f"rates, from {source}" in lines
    is_assumed = source == REPORTS and clusters == "ab"
    assert any("no cluster.toml" in line for line in lines) == is_assumed


def test_job_without_groups_has_no_empty_table(capsys):
    lines = shown(capsys, Prediction(missing="no model"), replace(FINDINGS, networks=()))
    assert "network of the process groups: none, because the job has one process" in lines
    assert not any("with gloo" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    findings = replace(
        FINDINGS,
        placed=(
            PlacedNodes("0-1023", "gpu-frankfurt-[0001-0128]", "frankfurt-1", "0-15", "0-127"),
        ),
        networks=(GroupsOnNetwork("data with context", 1024, "frankfurt-1", "ethernet"),),
        rates=(NetworkRate("frankfurt-1 - amsterdam-1", "link", 1.25e9, 0.0123),),
    )
    lines = shown(capsys, Prediction(missing="no model"), findings)
    rules = [number for number, line in enumerate(lines) if line.startswith("───")]
    assert len(rules) == 3
    for number in rules:
        assert max(map(len, lines[number - 1 : number + 2])) <= width


def test_document():
    content = json.loads(json.dumps(document(FINDINGS, Prediction(missing="no model"))))
    assert content["status"] == 1
    assert content["prediction"]["missing"] == "no model"
    assert content["groups"] == [{"kind": "data", "groups": 4, "nccl": "a", "gloo": "ethernet"}]
