"""Other ways to copy a folder from the trainer to the hosts of all sites, for benchmarks/weights.py.

rsync      each site's first host pulls over ssh, then its other hosts from it
S3         each host downloads from a server on the trainer's host (moto), with 8 connections of boto3
broadcast  torch.distributed with gloo, from the trainer's rank to all hosts' ranks; not encrypted
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holmes_lab import Lab
from holmes_lab.launchers import ssh
from weights_lab import TRAINER, Network, Programs, address_of, sent_bytes, wait_until

_S3_PORT = 5000
_KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
_UPLOAD = textwrap.dedent(
    """
    import sys, boto3
    client = boto3.client("s3", endpoint_url=sys.argv[1])
    client.create_bucket(Bucket="weights")
    client.upload_file(sys.argv[2], "weights", "model")
    """
)
_DOWNLOAD = textwrap.dedent(
    """
    import sys, time, boto3
    from boto3.s3.transfer import TransferConfig
    client = boto3.client("s3", endpoint_url=sys.argv[1])
    config = TransferConfig(max_concurrency=8, multipart_chunksize=8 * 2**20)
    begin = time.monotonic()
    client.download_file("weights", "model", sys.argv[2], Config=config)
    print("FROM", begin, "TO", time.monotonic(), flush=True)
    """
)
_BROADCAST = textwrap.dedent(
    """
    import sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    data = torch.zeros(int(sys.argv[1]), dtype=torch.uint8)
    dist.barrier()
    begin = time.monotonic()
    dist.broadcast(data, 0)
    print("SECONDS", time.monotonic() - begin, flush=True)
    """
)


class Copied(NamedTuple):
    """Time and traffic of a copy from the trainer to all hosts."""

    seconds: float  # until the last host had it
    bytes: int  # that the trainer's host has sent


def rsync(lab: Lab, network: Network, source: Path, folder: Path, program: Path) -> Copied:
    """Copy a folder to all hosts with rsync over ssh, and return the time and the traffic.

    The first host of each site copies from the trainer. Then the other hosts of the site copy from it.

    Args:
        lab: The emulated network, with TCP tuned for long links.
        network: The sites and their hosts.
        source: Folder to copy.
        folder: New folder for the copies of all hosts, and for the configuration of ssh.
        program: Path of rsync.
    """
    folder.mkdir()
    hosts = [TRAINER, *(host for site in network.site_hosts for host in site)]
    ssh.configure(folder, {host: {} for host in hosts})
    programs = Programs(lab)
    for daemon in ssh.daemons(folder, hosts, os.environ):
        command = ["sh", "-c", f"mkdir -p /run/sshd; exec {shlex.join(daemon.argv)}"]
        programs.start(daemon.host, command)
    time.sleep(1.0)
    before = sent_bytes(lab)
    start = time.monotonic()
    source_of_first: dict[str, str] = {}  # first host of a site -> HOST:FOLDER to copy from
    source_of_other: dict[str, str] = {}
    for first, *others in network.site_hosts:
        source_of_first[first] = f"{address_of(lab, TRAINER)}:{source}/"
        for host in others:
            source_of_other[host] = f"{address_of(lab, first)}:{folder / first}/"
    rsync_command = [str(program), "-a", "--whole-file", f"--rsync-path={program}"]
    rsync_command += ["-e", f"ssh -F {folder}/ssh_config"]
    for source_of_host in (source_of_first, source_of_other):
        commands = {}
        for host, source_of_copy in source_of_host.items():
            commands[host] = [*rsync_command, source_of_copy, f"{folder / host}/"]
        _run_all(programs, commands)
    copied = Copied(time.monotonic() - start, sent_bytes(lab) - before)
    programs.close()
    return copied


def s3(lab: Lab, network: Network, source: Path, folder: Path, python: Path) -> Copied:
    """Copy a file to all hosts by an S3 server on the trainer's host, and return the time and the traffic.

    Each host downloads the file from the server. The upload to the server is not measured.

    Args:
        lab: The emulated network.
        network: The sites and their hosts.
        source: Folder with the file.
        folder: New folder for the copies of all hosts.
        python: Python interpreter of an environment with moto[server] and boto3.
    """
    folder.mkdir()
    programs = Programs(lab)
    lines: list[str] = []
    server = [str(python.parent / "moto_server"), "-H", "0.0.0.0", "-p", str(_S3_PORT)]
    programs.start(TRAINER, server, lines.append)
    wait_until(lambda: any("Running on" in line for line in lines))
    [file] = source.iterdir()
    url = f"http://{address_of(lab, TRAINER)}:{_S3_PORT}"
    upload = [str(python), "-c", _UPLOAD, f"http://127.0.0.1:{_S3_PORT}", str(file)]
    _run_all(programs, {TRAINER: upload}, **_KEYS)
    before = sent_bytes(lab)
    downloads = {
        host: [str(python), "-c", _DOWNLOAD, url, str(folder / host)]
        for site in network.site_hosts
        for host in site
    }
    lines = _run_all(programs, downloads, **_KEYS)
    times = [line.split() for line in lines if line.startswith("FROM")]
    begin = min(float(words[1]) for words in times)  # without the start of Python
    copied = Copied(max(float(words[3]) for words in times) - begin, sent_bytes(lab) - before)
    programs.close()
    return copied


def broadcast(lab: Lab, network: Network, size: int) -> Copied:
    """Broadcast `size` bytes from the trainer to all hosts with gloo; return the time and the traffic."""
    hosts = [TRAINER, *itertools.chain(*network.site_hosts)]
    before = sent_bytes(lab)
    result = lab.run([sys.executable, "-c", _BROADCAST, str(size)], order=hosts, timeout=300)
    seconds = []  # that each host has printed
    for text in result.outputs.values():
        for line in text.splitlines():
            if line.startswith("SECONDS"):
                seconds.append(float(line.split()[1]))
    if len(seconds) != len(hosts):
        raise RuntimeError(f"broadcast: {result.outputs}")
    return Copied(max(seconds), sent_bytes(lab) - before)


def _run_all(
    programs: Programs, command_of: dict[str, Sequence[str]], **variables: str
) -> list[str]:
    """Run commands on several nodes at the same time, and return the lines that all of them print.

    Args:
        programs: Starts the commands.
        command_of: Name of a node -> its command.
        variables: Additional environment variables of the commands.

    Raises:
        RuntimeError: A command failed.
    """
    lines: list[str] = []
    jobs = [programs.start(node, command, **variables) for node, command in command_of.items()]
    for job in jobs:
        result = job.wait()
        if result.returncode:
            raise RuntimeError(f"{result.outputs}")
        lines += [line for text in result.outputs.values() for line in text.splitlines()]
    return lines
