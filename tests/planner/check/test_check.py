"""Tests the flag --holmes-check, and its report for a job of one process."""

import json
import subprocess
import sys

import pytest

from holmes_ext import _pth, extensions
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


def test_holmes_switched_off_starts_the_script(script, monkeypatch):
    monkeypatch.setenv("HOLMES", "0")
    assert run(script, "--holmes-check").stdout == "FIRST STEP\n"


class _Site:
    source = "cluster.toml"


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


def test_document():
    content = json.loads(json.dumps(document(FINDINGS, Prediction(missing="no model"))))
    assert content["status"] == 1
    assert content["prediction"]["missing"] == "no model"
    assert content["groups"] == [{"kind": "data", "groups": 4, "nccl": "a", "gloo": "ethernet"}]
