"""examples/weights: generators generate the same tokens as the trainer's own model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rl_stacks import imported
from safetensors.torch import load_file
from weights_runs import Process, environment, free_port, until

from holmes_ext import weights

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights"


@pytest.fixture
def served(tmp_path):
    """Return the home and the port of a coordinator."""
    port = free_port()
    home = tmp_path / "home"
    serve = Process("join", "serve", "--host", "127.0.0.1", "--port", port, home=home)
    until(lambda: any("jobs meet" in line for line in serve.lines), 60)
    yield home, port
    serve.kill()


@pytest.fixture
def start(served):
    """Return a function that starts a script of the example, which ends with the test."""
    processes = []

    def start_script(script, *arguments):
        command = [sys.executable, EXAMPLE / script, *map(str, arguments)]
        env = {**environment(served[0]), "OMP_NUM_THREADS": "1"}  # they share the cores
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start_script
    for process in processes:
        process.kill()
        process.communicate()


def versions_of(process):
    """Return the lines of a script that name the digest and the tokens of a version."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    return [line for line in output.splitlines() if line.startswith("version ")]


def test_generators_generate_what_the_trainer_does(served, start, tmp_path, request):
    home, port = served
    site = tmp_path / "east"
    arguments = ("weights", "receive", site, "--join", f"east@127.0.0.1:{port}")
    request.addfinalizer(Process(*arguments, home=home).kill)
    generator = start("generator.py", site, "--until", 5)
    # A high learning rate, so that each version generates other tokens.
    options = ("--versions", 5, "--full-every", 3, "--learning-rate", 1e-3, "--port", port)
    trained = versions_of(start("trainer.py", *options))
    assert len({line.partition("generates")[2] for line in trained}) == 5, trained
    generated = versions_of(generator)
    assert generated[-1] == trained[-1] and set(generated) <= set(trained)

    # A process that starts now gets the same bits from the last full version and its delta.
    folders = weights.current_folders(site)
    assert [folder.name for folder in folders] == ["4", "5"]
    with imported((), {}, [EXAMPLE]) as load:
        files = load("weight_files")
        assert f"version 5: {files.digest(files.load(folders))} " in trained[-1]


def test_publish_twice_by_the_public_function(served, tmp_path, monkeypatch):
    home, port = served
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a").write_text("a")
    weights.publish(tmp_path / "made", 1, port=port)
    weights.publish(tmp_path / "made", 2, parent=1, port=port)


def test_a_delta_has_all_bits_that_differ(tmp_path):
    """The sign of zero changes, and a NaN stays: equality of numbers would miss the first."""
    before = {"a": torch.tensor([[0.0, 1.0], [2.0, float("nan")]]).bfloat16(), "b": torch.ones(())}
    after = {"a": torch.tensor([[-0.0, 1.0], [3.0, float("nan")]]).bfloat16(), "b": torch.ones(())}
    with imported((), {}, [EXAMPLE]) as load:
        files = load("weight_files")
        files.save_delta(tmp_path, after, before)
        assert len(load_file(tmp_path / "delta.safetensors")["a:positions"]) == 2
        files.apply_delta(tmp_path, before)
        assert files.digest(before) == files.digest(after)
