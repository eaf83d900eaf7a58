"""Hooks of slime: its weight versions reach generators at other sites through `holmes weights`.

    trainer     --update-weight-transport disk --update-weight-disk-dir DIR
                --custom-update-weight-post-write-path slime_hooks.publish
    generators  --sglang-custom-pull-weights-pre-read-hook slime_hooks.wait_for
                and `holmes weights receive DIR --join SITE@HOST:PORT` on each host, with the same DIR

slime calls `publish` on every rank after all ranks have written a version, and `wait_for` on every host of an
engine before it reads the version. slime numbers the versions of each run from 1, so each run needs a new
`holmes join serve` (another --port, or a new HOLMES_WEIGHTS_STORE).
"""

import json
import os
import time
from pathlib import Path

from holmes_ext import weights

PREFIX = "weight_v"
#: Seconds that an engine waits for a version.
TIMEOUT_S = float(os.environ.get("WEIGHTS_TIMEOUT_S", "1800"))


def publish(args, version_dir, rollout_engines):
    """Publish a version that slime has written (--custom-update-weight-post-write-path)."""
    folder = Path(version_dir)
    # slime also calls the hook once for the empty folder of all versions.
    if not folder.name.startswith(PREFIX) or int(os.environ.get("RANK", "0")) != 0:
        return
    version = int(folder.name.removeprefix(PREFIX))
    port = int(os.environ.get("WEIGHTS_PORT", "29600"))
    weights.publish(folder, version, parent=_parent_of(folder), port=port)


def _parent_of(folder):
    """Return the version to which a folder is a delta; None: it is full, or a delta to the checkpoint."""
    index = folder / "model.safetensors.index.json"
    metadata = json.loads(index.read_text()).get("metadata", {}) if index.exists() else {}
    return int(metadata.get("base_version", 0)) or None


def wait_for(source_dir, target_version):
    """Wait until a version is here (--sglang-custom-pull-weights-pre-read-hook)."""
    end = time.monotonic() + TIMEOUT_S
    while int(target_version) > 0 and not (Path(source_dir) / str(target_version)).is_dir():
        if time.monotonic() > end:
            raise TimeoutError(
                f"version {target_version} is not in {source_dir}; is `holmes weights receive` running?"
            )
        time.sleep(0.1)
    for folder in Path(source_dir).iterdir():
        if folder.name.isdecimal():
            _link(Path(source_dir) / f"{PREFIX}{int(folder.name):06d}", folder.name)


def _link(path, target):
    """Give a version the name that slime reads; several processes of a host may do so."""
    try:
        path.symlink_to(target)
    except FileExistsError:
        pass
