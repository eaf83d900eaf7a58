"""Loads the committed weights of a site whenever they change: a full version, then deltas on top of it."""

import argparse
import time

import torch

from holmes_ext import weights


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", help="DIR of `holmes weights receive DIR`")
    parser.add_argument("--until", type=int, required=True, help="version after which to end")
    options = parser.parse_args()

    loaded = None
    while loaded != options.until:
        folders = weights.current_folders(options.directory)
        newest = int(folders[-1].name) if folders else None
        if newest == loaded:
            time.sleep(0.05)
            continue
        tensors = {}
        for folder in folders:
            tensors.update(torch.load(folder / "weights.pt"))
        loaded = newest
        total = sum(tensor.double().sum().item() for tensor in tensors.values())
        print(f"version {loaded}: sum of the weights: {total}", flush=True)


if __name__ == "__main__":
    main()
