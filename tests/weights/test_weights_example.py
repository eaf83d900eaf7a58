"""examples/weights: trainer and generators end with the same weights; the hooks of slime."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from weights_runs import Process, environment, free_port, holmes, until

from holmes_ext import weights
from holmes_ext.weights.store import VersionStore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights"


@pytest.fixture
def served(tmp_path):
    """Return the home and the port of a coordinator."""
    port = free_port()
    home = tmp_path / "home"
    serve = Process("join", "serve", "--host", "127.0.0.1", "--port", port, home=home)
    until(lambda: any("jobs meet" in line for line in serve.lines))
    yield home, port
    serve.kill()


def test_trainer_and_two_sites(served, tmp_path):
    home, port = served
    receivers = [
        Process(
            "weights", "receive", tmp_path / site, "--join", f"{site}@127.0.0.1:{port}", home=home
        )
        for site in ("east", "west")
    ]
    trainer = [sys.executable, EXAMPLE / "trainer.py", "--port", str(port), "--versions", "6"]
    trained = subprocess.run(trainer, env=environment(home), capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    expected = trained.stdout.splitlines()[-1]
    for site in ("east", "west"):
        generator = [sys.executable, EXAMPLE / "generator.py", tmp_path / site, "--until", "6"]
        done = subprocess.run(
            generator, env=environment(home), capture_output=True, text=True, timeout=30
        )
        assert done.stdout.splitlines()[-1] == f"version 6: {expected}", done.stderr
    for receiver in receivers:
        receiver.kill()


def test_publish_twice_by_the_public_function(served, tmp_path, monkeypatch):
    home, port = served
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a").write_text("a")
    weights.publish(tmp_path / "made", 1, port=port)
    weights.publish(tmp_path / "made", 2, parent=1, port=port)


def test_hooks_of_slime(served, tmp_path, monkeypatch):
    """As slime calls them: for the empty folder first, then for deltas, on ranks 0 and 1."""
    home, port = served
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.setenv("WEIGHTS_PORT", str(port))
    spec = importlib.util.spec_from_file_location("slime_hooks", EXAMPLE / "slime_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    source = tmp_path / "trainer"
    source.mkdir()
    hooks.publish(None, str(source), [])
    for version in (1, 2):
        folder = source / f"weight_v{version:06d}"
        folder.mkdir()
        (folder / "model-00000-of-00001.safetensors").write_bytes(os.urandom(100))
        metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}"}
        index = {"metadata": metadata, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            hooks.publish(None, str(folder), [])
    site = tmp_path / "site"
    result = holmes(home, "weights", "receive", site, "--join", f"east@127.0.0.1:{port}", "--once")
    assert result.returncode == 0, result.stderr
    assert VersionStore(site).chain(2) == [1, 2]
    hooks.wait_for(str(site), 0)
    hooks.wait_for(str(site), 2)
    for version in (1, 2):
        name = f"weight_v{version:06d}"
        for file in (source / name).iterdir():
            assert (site / name / file.name).read_bytes() == file.read_bytes()
