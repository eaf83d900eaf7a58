"""Hooks of slime and miles: their weight versions reach generators at other sites through `holmes weights`.

    trainer     --custom-update-weight-post-write-path slime_hooks.publish
    generators  --sglang-custom-pull-weights-pre-read-hook slime_hooks.wait_for
                and `holmes weights receive DIR --join SITE@HOST:PORT` on each host, with the DIR of
                --update-weight-disk-dir

Both trainers call `publish` on every rank after all ranks have written a version, and sglang calls
`wait_for` on every host of an engine before it reads the version. A run numbers its versions from 1, so each
run needs a new `holmes join serve` (another --port, or a new HOLMES_WEIGHTS_STORE).
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from holmes_ext import weights

PREFIX = "weight_v"


def publish(args, version_dir, rollout_engines):
    """Publish a version that the trainer has written (--custom-update-weight-post-write-path).

    Args:
        args: Options of the trainer; not used.
        version_dir: Folder of the version, such as DIR/weight_v000012.
        rollout_engines: Engines of the trainer; not used.
    """
    folder = Path(version_dir)
    # The hook is also called once for the empty folder of all versions.
    if not folder.name.startswith(PREFIX) or int(os.environ.get("RANK", "0")) != 0:
        return
    version = int(folder.name.removeprefix(PREFIX))
    port = int(os.environ.get("WEIGHTS_PORT", "29600"))
    weights.publish(folder, version, parent=_parent_of(folder), port=port)


def _parent_of(folder):
    """Return the version to which a folder is a delta.

    Returns:
        None if the folder is a full version, or a delta to the checkpoint from which training began
        (version 0), which all engines have.
    """
    index = folder / "model.safetensors.index.json"
    metadata = json.loads(index.read_text()).get("metadata", {}) if index.exists() else {}
    return int(metadata.get("base_version", 0)) or None


def wait_for(source_dir, target_version):
    """Wait until a version has arrived on this host (--sglang-custom-pull-weights-pre-read-hook).

    Then makes links with the names under which sglang reads the version and the versions to which it is a
    delta, such as weight_v000012 for the folder 12.

    Args:
        source_dir: DIR of `holmes weights receive DIR`.
        target_version: Number of the version; 0: the checkpoint from which training began.
    """
    if int(target_version) == 0:  # the checkpoint that the engine has already
        return
    for folder in weights.wait_for_version(source_dir, int(target_version)):
        link = Path(source_dir) / f"{PREFIX}{int(folder.name):06d}"
        with suppress(FileExistsError):  # several processes of a host do this
            link.symlink_to(folder.name)
