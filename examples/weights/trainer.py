"""Trains a small model, and publishes its weights: a full version, then only the changed tensors."""

import argparse
import tempfile
from pathlib import Path

import torch

from holmes_ext import weights


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument(
        "--full-every", type=int, default=4, help="deltas between two full versions"
    )
    parser.add_argument("--port", type=int, default=29600, help="port of `holmes join serve`")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    published = {}
    for version in range(1, options.versions + 1):
        train(model, trained=version % len(model))
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parent = None if version % options.full_every == 1 else version - 1
        if parent is None:
            changed = tensors
        else:
            changed = {
                name: tensor
                for name, tensor in tensors.items()
                if not torch.equal(tensor, published[name])
            }
        with tempfile.TemporaryDirectory() as folder:
            torch.save(changed, Path(folder) / "weights.pt")
            weights.publish(folder, version, parent=parent, port=options.port)
        published = tensors
        print(f"version {version}: {len(changed)} of {len(tensors)} tensors", flush=True)
    print(f"sum of the weights: {checksum(published)}", flush=True)


def train(model, trained):
    """Take a step with one layer of the model."""
    optimizer = torch.optim.SGD(model[trained].parameters(), lr=0.1)
    model(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
    model.zero_grad()


def checksum(tensors):
    return sum(tensor.double().sum().item() for tensor in tensors.values())


if __name__ == "__main__":
    main()
