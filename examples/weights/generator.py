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
            # A newer version was committed, and a folder of this one was removed while it was read.
            model, loaded = None, []
            continue
        loaded = folders
        print(line(loaded[-1].name, model), flush=True)


def load(folders, model, loaded):
    """Return a model with the weights of a version.

    If the version consists of the folders in use and further deltas, only those deltas are applied to the
    model in use. Otherwise the model is loaded anew.

    Args:
        folders: Folders of the version: a full version, then the deltas to apply to it.
        model: Model in use, which may be changed; None: there is none yet.
        loaded: Folders of the version in use, in the same order; an empty list: there is none yet.
    """
    deltas = folders[len(loaded) :]
    builds_on_loaded = bool(loaded) and folders[: len(loaded)] == loaded
    if not builds_on_loaded:
        model = LlamaForCausalLM.from_pretrained(folders[0], dtype="bfloat16").eval()
        deltas = folders[1:]
    for folder in deltas:
        apply_delta(folder, model.state_dict())
    return model


if __name__ == "__main__":
    main()
