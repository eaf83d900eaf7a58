"""Tests `holmes probe` on emulated nodes.

The command measures every network and writes the curves into cluster.toml, whose other lines must not change.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from holmes_ext.cluster.spec import load_spec
from integration_tests.jobs import ON_GPUS, full

FILE = Path(__file__).parents[2] / "benchmarks" / "two_nodes.toml"


@pytest.fixture
def probe(tmp_path):
    file = tmp_path / "cluster.toml"
    text = FILE.read_text().replace('nodes = ["a0"]', 'nodes = ["a0", "a1"]')
    # A busy machine can emulate this rate, too, so the network between the clusters is measured as flat.
    text = text.replace('rate = "250Mb/s"', 'rate = "50Mb/s"')
    file.write_text(text)

    def run(*arguments):
        command = [sys.executable, "-m", "holmes_ext.cli.main"]
        command += [
            "lab",
            "run",
            "--cluster",
            str(file),
            "--quiet",
            "--preload",
            "torch",
            "--timeout",
            "240",
            *(["--gpu"] if ON_GPUS else []),
            "--",
        ]
        command += [
            sys.executable,
            "-m",
            "holmes_ext.cli.main",
            "probe",
            "--cluster",
            str(file),
            "--largest",
            "0.0625",
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    return run, file, text


@pytest.mark.full(share=4)
def test_every_fabric_gets_its_curves(probe):
    run, file, text = probe
    dry = run("--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert file.read_text() == text and "[link.ethernet]" in dry.stdout
    result = run()
    assert result.returncode == 0, result.stderr
    written = file.read_text()
    assert written.startswith(text.rstrip("\n")) and "wrote" in result.stderr
    links = load_spec(file).links
    assert set(links) == {"ethernet", "a"}
    for link in links.values():
        for points in (link.send, link.ring):
            assert [size for size, _ in points] == [1024, 4096, 16384, 65536]


@full
def test_pairs_of_clusters_are_measured_where_the_network_between_them_is_not_flat(probe):
    run, file, text = probe
    between = '[[between]]\nclusters = ["a", "b"]\nrate = "10Mb/s"\nlatency = "15ms"\n'
    file.write_text(text + between)
    result = run()
    assert result.returncode == 0, result.stderr
    spec = load_spec(file)
    (pair,) = spec.pairs
    assert pair.clusters == ("a", "b") and 0 < pair.rate_bps < 12e6 and pair.stream_bps > 0
    assert pair.latency_s >= 0.0145  # never less than the delay line's
    # Ethernet has no curve: no cluster uses it inside, and between the clusters the pair describes it.
    assert set(spec.links) == {"a"}
