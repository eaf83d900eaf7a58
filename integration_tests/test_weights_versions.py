"""50 versions of a small model in the lab: at every site, all tensors are those of the trainer, bit for bit.

A Llama is trained in this process. Each step's weights are a version: two of them are full, the others are
deltas. They are published by the hook of examples/weights for slime and miles, cross emulated links of 20 ms,
and are loaded from the receiving hosts' folders. The hosts of site east follow all versions. The host of site
west joins from time to time, and catches up.
"""

import json
import os
import sys

import pytest
import torch
import weights_runs
from holmes_lab.process.ranks import Program
from rl_stacks import imported
from safetensors.torch import save_file

from holmes_ext import weights
from integration_tests.jobs import ROOT, lab_fixture

transformers = pytest.importorskip("transformers")
VERSIONS = 50
FULL_VERSIONS = (1, 21)
FOLLOWERS = ("east0", "east1")
LATECOMER = "west0"
#: Version at which the latecomer joins -> the versions that it receives. At first it needs those since the
#: last full version; later it is 20 versions behind, 5, and 1.
RECEIVED_AT = {
    24: range(21, 25),
    44: range(25, 45),
    49: range(45, 50),
    50: range(50, 51),
}
PORT = 29600
LIMIT_S = 120.0
CLUSTERS = """
version = 2
[ethernet]
rate = "1Gb/s"
[[cluster]]
name = "trainer"
kind = "ethernet"
nodes = ["trainer0"]
[[cluster]]
name = "east"
kind = "ethernet"
nodes = ["east[0-1]"]
[[cluster]]
name = "west"
kind = "ethernet"
nodes = ["west0"]
[[between]]
clusters = ["trainer", "east"]
rate = "100Mb/s"
latency = "20ms"
[[between]]
clusters = ["trainer", "west"]
rate = "100Mb/s"
latency = "20ms"
[[between]]
clusters = ["east", "west"]
rate = "100Mb/s"
latency = "20ms"
"""
#: Integer type for the bits of a number of so many bytes.
BITS = {2: torch.int16, 4: torch.int32}

sites = lab_fixture(CLUSTERS)


def trained_weights():
    """Yield name -> tensor after each step: matrices in bfloat16, and norms in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(VERSIONS):
        tokens = torch.randint(config.vocab_size, (1, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {
            name: tensor.to(torch.float32 if "norm" in name else torch.bfloat16, copy=True)
            for name, tensor in model.state_dict().items()
        }


def write_version(folder, version, tensors, parent_tensors, files):
    """Write a version as slime and miles do: safetensors files, and an index that has a delta's parent.

    Args:
        folder: Folder of the version, which is made.
        version: Number of the version.
        tensors: Name -> tensor.
        parent_tensors: The same of the version before.
        files: The module weight_files of the example, which writes deltas.
    """
    folder.mkdir(parents=True)
    metadata = {"version": f"{version:06d}"}
    if version in FULL_VERSIONS:
        names = sorted(tensors)
        for number in (1, 2):
            shard = {name: tensors[name] for name in names[number - 1 :: 2]}
            save_file(shard, folder / f"model-{number:05d}-of-00002.safetensors")
    else:
        metadata["base_version"] = f"{version - 1:06d}"
        files.save_delta(folder, tensors, parent_tensors)
    index = {"metadata": metadata, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class WeightsRun:
    """Processes of `holmes join serve` and `holmes weights receive` on the hosts of the lab.

    Args:
        lab: The lab.
        folder: Folder for the state and the versions of all hosts.
    """

    def __init__(self, lab, folder):
        self._lab = lab
        self._folder = folder
        self._jobs = []
        self._address = next(node.address for node in lab.nodes if node.name == "trainer0")
        self.home = folder / "trainer0"
        serve = self._start("trainer0", "join", "serve", "--port", PORT)
        weights_runs.until(lambda: "jobs meet" in serve.text)

    def directory(self, host):
        """Return DIR of `holmes weights receive DIR` on a host."""
        return self._folder / host / "weights"

    def receive(self, host, *options):
        """Start a receiver on a host, such as east0 of site east."""
        site = host[:-1]
        arguments = ("--join", f"{site}@{self._address}:{PORT}", "--json", *options)
        invitation = self._folder / f"{host}.json"
        if not invitation.exists():
            command = ("join", "invite", site, "--address", self._address, "--output", invitation)
            invited = weights_runs.holmes(self.home, *command)
            assert invited.returncode == 0, invited.stderr
        directory = self.directory(host)
        return self._start(
            host, "weights", "receive", directory, *arguments, "--invitation", invitation
        )

    def receive_once(self, host):
        """Let a host receive what it lacks; return the events of the versions that it has staged."""
        receiver = self.receive(host, "--once")
        result = receiver.job.wait(LIMIT_S)
        assert result.returncode == 0, receiver.text
        events = [json.loads(line) for line in receiver.text.splitlines() if line[0] == "{"]
        return [event for event in events if event["event"] == "staged"]

    def current(self, host):
        link = self.directory(host) / "current"
        return int(os.readlink(link)) if link.is_symlink() else None

    def wait_until_committed(self, version):
        """Wait until the hosts of site east use a version."""
        weights_runs.until(lambda: all(self.current(host) == version for host in FOLLOWERS))

    def _start(self, host, *arguments):
        command = [sys.executable, "-m", "holmes_ext.cli.main", *map(str, arguments)]
        env = {**os.environ, "XDG_STATE_HOME": str(self._folder / host), "OMP_NUM_THREADS": "1"}
        program = HostProgram()
        program.job = self._lab.start_programs(
            [Program(host=host, argv=command, env=env)], timeout=400, on_line=program.add_line
        )
        self._jobs.append(program.job)
        return program

    def close(self):
        for job in self._jobs:
            job.kill()
            job.wait()


class HostProgram:
    """Program on a host of the lab, and the text that it has printed so far."""

    def __init__(self):
        self.job = None
        self.text = ""

    def add_line(self, rank, line, stream):
        self.text += f"{line}\n"


@pytest.fixture
def run(sites, tmp_path, monkeypatch):
    running = WeightsRun(sites.lab, tmp_path)
    # For slime_hooks.publish() in this process, which writes to the store of the run only.
    monkeypatch.setenv("XDG_STATE_HOME", str(running.home))
    monkeypatch.setenv("WEIGHTS_PORT", str(PORT))
    monkeypatch.setenv("RANK", "0")
    yield running
    running.close()


class LoadedWeights:
    """Tensors that a host of a site loads version by version from its folder, as its engine does.

    Args:
        directory: DIR of `holmes weights receive DIR` on the host.
        files: The module weight_files of the example.
    """

    def __init__(self, directory, files):
        self._directory = directory
        self._files = files
        self.tensors = {}

    def go_on_to(self, version):
        """Load a full version, or apply a delta to the tensors of the version before."""
        folders = weights.wait_for_version(self._directory, version, timeout_s=LIMIT_S)
        assert int(folders[-1].name) == version
        if version in FULL_VERSIONS:
            self.tensors = self._files.load(folders)
        else:
            self._files.apply_delta(folders[-1], self.tensors)


def assert_same_bits(found, expected, place):
    assert found.keys() == expected.keys(), place
    for name, tensor in expected.items():
        copy = found[name]
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape, (place, name)
        bits = BITS[tensor.element_size()]
        assert torch.equal(copy.view(bits), tensor.view(bits)), (place, name)


def test_all_tensors_are_bit_exact_in_50_versions_and_after_catching_up(run, tmp_path):
    with imported((), {}, [ROOT / "examples" / "weights"]) as load:
        publish_and_compare(run, tmp_path / "trainer", load("slime_hooks"), load("weight_files"))


def publish_and_compare(run, folder, hooks, files):
    trained = {}  # version -> its tensors
    followers = {host: LoadedWeights(run.directory(host), files) for host in FOLLOWERS}
    latecomer = LoadedWeights(run.directory(LATECOMER), files)
    for host in FOLLOWERS:
        run.receive(host)
    for version, tensors in enumerate(trained_weights(), start=1):
        trained[version] = tensors
        write_version(folder_of(folder, version), version, tensors, trained.get(version - 1), files)
        hooks.publish(None, str(folder_of(folder, version)), [])
        for host, loaded in followers.items():
            loaded.go_on_to(version)
            assert_same_bits(loaded.tensors, tensors, f"{host}, version {version}")
        if version in RECEIVED_AT:
            run.wait_until_committed(version)
            catch_up(run, latecomer, RECEIVED_AT[version], folder, trained)
            at_once = files.load(weights.current_folders(run.directory(LATECOMER)))
            assert_same_bits(at_once, tensors, f"{LATECOMER}, version {version} loaded at once")


def catch_up(run, latecomer, versions, folder, trained):
    """Let the latecomer join until it is up to date; compare its tensors in each version that it received."""
    staged = run.receive_once(LATECOMER)
    assert [event["version"] for event in staged] == list(versions)
    assert {event["source"] for event in staged} == {"service"}  # over the emulated WAN
    sizes = [
        sum(file.stat().st_size for file in folder_of(folder, version).iterdir())
        for version in versions
    ]
    assert [event["pulled_bytes"] for event in staged] == sizes
    assert run.current(LATECOMER) == versions[-1]
    for version in versions:
        latecomer.go_on_to(version)
        assert_same_bits(latecomer.tensors, trained[version], f"{LATECOMER}, version {version}")


def folder_of(folder, version):
    """Return the folder into which the trainer writes a version; slime and miles use this name."""
    return folder / f"weight_v{version:06d}"
