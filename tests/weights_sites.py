"""Sites that receive weights over loopback, and random tensors for them: for tests of examples/weights."""

from pathlib import Path

import torch
from weights_runs import Process, free_port, until

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "weights"


class Sites:
    """A coordinator on this host, and a receiving host of two sites."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.port = free_port()
        self._folder = folder
        serve = self._started("join", "serve", "--host", "127.0.0.1", "--port", self.port)
        self._processes = [serve]
        until(lambda: any("jobs meet" in line for line in serve.lines), 60)
        self.directories = [folder / "east", folder / "west"]
        for directory in self.directories:
            address = f"{directory.name}@127.0.0.1:{self.port}"
            process = self._started("weights", "receive", directory, "--join", address)
            self._processes.append(process)

    def _started(self, *arguments):
        return Process(*arguments, home=self.home)

    def close(self):
        for process in self._processes:
            process.kill()


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed.weight": (50, 16), "model.layers.0.weight": (16, 16), "norm": (16,)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
