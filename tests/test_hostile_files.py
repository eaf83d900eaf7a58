"""Every reader of a user's file: pipes that nobody fills, endless devices, sparse files and lists in lists.

They end in one line, or count as no file.
"""

import os

import pytest

from holmes_ext import document
from holmes_ext.cluster.addresses import captured_addresses
from holmes_ext.cluster.nccl import file_settings
from holmes_ext.cluster.sources.hostfile import read_hostfile
from holmes_ext.cluster.sources.kubernetes import read_nodes
from holmes_ext.cluster.sources.slurm import nodes_of_file
from holmes_ext.cluster.spec import load_spec
from holmes_ext.doctor.command.forwarded import _names_in_files
from holmes_ext.doctor.command.launch_options import accelerate_config
from holmes_ext.doctor.frameworks import _start_up_code, check_script
from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.deepspeed.checkpoints import SPLIT, saved_split, tag_of
from holmes_ext.plan.experts import load_order, load_traffic
from holmes_ext.plan.plan import load_plan
from holmes_ext.plan.profile import load_profile
from holmes_ext.planner.html.pictures import load_traces
from holmes_ext.report import files as report_files

DEEP = "[" * 100_000

#: Name of a reader -> (name of its file, the reader: called with the file's path).
READERS = {
    "cluster.toml": ("cluster.toml", load_spec),
    "plan.json": ("plan.json", load_plan),
    "model.json": ("model.json", load_profile),
    "experts.json": ("experts.json", load_traffic),
    "order.json": ("order.json", load_order),
    "hostfile": ("hostfile", lambda path: read_hostfile(str(path))),
    "nodes.json": ("nodes.json", lambda path: read_nodes(str(path))),
    "slurm.conf": ("slurm.conf", lambda path: nodes_of_file(str(path))),
    "ip addresses": ("ip_addr.json", lambda path: captured_addresses(str(path.parent))),
    "nccl.conf": ("nccl.conf", lambda path: file_settings({"NCCL_CONF_FILE": str(path)}, "none")),
    "deepspeed_env": ("env", lambda path: _names_in_files({"DS_ENV_FILE": str(path)})),
    "pth": ("a.pth", lambda path: list(_start_up_code([str(path.parent)]))),
    "script": ("train.py", lambda path: list(check_script(path))),
    "accelerate": ("config.yaml", lambda path: accelerate_config(str(path), {})),
    "ds_config": (
        "ds.json",
        lambda path: ds_config.from_arguments(["--deepspeed_config", str(path)]),
    ),
    "split": (SPLIT, lambda path: saved_split(path.parent, module=None, tensor=1)),
    "latest": ("latest", lambda path: tag_of(path.parent, None)),
    "traces": ("rank0.json", lambda path: load_traces(path.parent)),
    "telemetry": ("rank0.jsonl", report_files.read),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "endless", "sparse", "folder", "levels"])
def test_what_is_no_file_is_one_line_or_nothing(tmp_path, monkeypatch, reader, kind):
    monkeypatch.setattr(document, "_MOST_BYTES", 2**20)
    monkeypatch.setattr(document, "_PIPE_S", 0.01)
    name, read = READERS[reader]
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text(DEEP if kind == "levels" else "")
    if kind == "sparse":
        os.truncate(path, 2**36)
    try:
        read(path)
    except HolmesError as error:
        assert str(error).count("\n") == 0 and name in str(error)


def test_a_process_substitution_is_read(tmp_path):
    """`holmes plan --cluster <(...)`, and the same for every other file."""
    reading, writing = os.pipe()
    os.write(writing, b"host1 slots=2\nhost2 slots=2\n")
    os.close(writing)
    assert len(read_hostfile(f"/proc/self/fd/{reading}")) == 2
    os.close(reading)
