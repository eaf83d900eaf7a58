"""Generates tokens with each committed version of a site: loads a full version, then applies deltas to it."""

import argparse
import time

from trainer import line
from transformers import LlamaForCausalLM
from weight_files import apply_delta

from holmes_ext import weights


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", help="DIR of `holmes weights receive DIR`")
    parser.add_argument("--until", type=int, required=True, help="version after which to end")
    options = parser.parse_args()

    model, loaded = None, []  # folders of the version in use
    while not loaded or int(loaded[-1].name) < options.until:
        folders = weights.current_folders(options.directory)
        if folders == loaded:
            time.sleep(0.05)
            continue
        try:
            model = load(folders, model, loaded)
        except Exception:
            if all(folder.exists() for folder in folders):
                raise
            model, loaded = None, []  # a newer version is committed, and this one was removed
            continue
        loaded = folders
        print(line(loaded[-1].name, model), flush=True)


def load(folders, model, loaded):
    """Return the model of a version; `model` is that of the folders `loaded`, and may be changed."""
    deltas = folders[len(loaded) :]
    if not loaded or folders[: len(loaded)] != loaded:  # it does not build on the version in use
        model = LlamaForCausalLM.from_pretrained(folders[0], dtype="bfloat16").eval()
        deltas = folders[1:]
    for folder in deltas:
        apply_delta(folder, model.state_dict())
    return model


if __name__ == "__main__":
    main()
