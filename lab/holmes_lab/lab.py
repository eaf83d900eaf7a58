"""Emulation of a site (clusters with nodes and networks) on this machine.

The class `Lab` creates the nodes, runs jobs on them, reads the counters of their NICs, and breaks links.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab import state
from holmes_lab.gpu.job import Gpus, preload_environment
from holmes_lab.network import inter_cluster, namespaces, sysfs_tree
from holmes_lab.network import shaping as network
from holmes_lab.process import fork_server, ranks, wire
from holmes_lab.process.job import Job, OnLine, RunResult
from holmes_lab.process.keeper_process import PACKAGE_FOLDERS, KeeperProcess
from holmes_lab.process.templates import TemplateKey, Templates
from holmes_lab.rights import program

_SWITCH = ""  # name of the switch, where other functions take the name of a node
_FIRST_PORT = 29500  # MASTER_PORT of the first job, below the ephemeral ports


class Lab:
    """Emulated clusters: each node is a set of Linux namespaces with NICs of limited rates.

    The class is a context manager: the nodes exist inside the `with` block.

    Args:
        spec: The site, as in a cluster.toml.
        scale: Factor of all rates.
        realtime: Whether ranks run under SCHED_RR if that is permitted (RunResult.realtime tells).
        sysctl: Kernel settings of the network namespace of each node, such as
            {"net.ipv4.tcp_wmem": "4096 16384 67108864"}. Others are as on this machine.
        login: Whether there is a host "login" besides the nodes, where lab/launchers/ start jobs.

    Raises:
        HolmesError: This machine lacks a right or a tool. The message names it.
    """

    #: Preloaded Pythons that all labs of this process fork; None: each lab imports modules again.
    templates: ClassVar[Templates | None] = None

    def __init__(
        self,
        spec: SiteSpec,
        scale: float = 1.0,
        realtime: bool = False,
        sysctl: Mapping[str, str] = MappingProxyType({}),
        login: bool = False,
    ):
        """Lay out the nodes (arguments: see the class). They are created when `with` is entered."""
        self.spec, self.scale, self.realtime, self.sysctl = spec, scale, realtime, sysctl
        self.nodes = network.lay_out(spec, scale)
        self.hosts = self.nodes  # the nodes, and after them the host "login", if there is one
        if login:
            self.hosts = (*self.nodes, network.login_node(spec, self.nodes, scale))
        self._by_name = {node.name: node for node in self.hosts}
        self._tools = {name: program(name) for name in ("ip", "tc")}  # paths of these programs
        self._ports = itertools.count(_FIRST_PORT)  # values of MASTER_PORT for the jobs
        #: Control sockets of preloaded Pythons; ranks are forked from these.
        self._fork_servers: dict[TemplateKey, socket.socket] = {}
        #: Host -> PIDs of the process that keeps its namespaces alive.
        self._holders: dict[str, wire.HolderPids] = {}
        self.delay_line: int | None = None  # PID of the process that delays frames between clusters

    def __enter__(self) -> Lab:
        """Create the nodes and networks."""
        self.directory = state.new_directory()
        try:
            self._start_keeper()
            self._make_nodes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all jobs, remove nodes and networks, and return when they are gone."""
        if hasattr(self, "_keeper"):
            self._keeper.close()
            for server_control in self._fork_servers.values():
                server_control.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, command: Sequence[str], **options: Any) -> RunResult:
        """Start a job, wait for its end, and return its result.

        An exception, such as KeyboardInterrupt, kills the job.

        Args:
            command: Program and arguments of each process.
            options: Keyword arguments of start().
        """
        job = self.start(command, **options)
        try:
            return job.wait()
        except BaseException:
            job.kill()
            raise

    def start(
        self,
        command: Sequence[str],
        *,
        order: Sequence[str] | None = None,
        processes: int | None = None,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        timeout: float | None = None,
        on_line: OnLine | None = None,
        logs: Path | None = None,
        accelerator: Mapping[str, Any] | None = None,
        grace: float = 5.0,
        cwd: str | Path | None = None,
        gpus: Gpus | None = None,
    ) -> Job:
        """Start a command once for each process of each node, and return the running job.

        Args:
            command: Program and arguments of each process.
            order: Names of the nodes in the order of their ranks. None: all, in the order of the file.
            processes: Processes of each node; None for the number in the file.
            env: Variables in addition to those of this process.
            preload: Modules that are imported once, in a process that then forks all ranks.
                `command` must be `python SCRIPT ...` or `python -m MODULE ...`.
            timeout: Seconds after which the job ends with status 124; None: no limit.
            on_line: Called in a thread as on_line(rank, line, "stdout" or "stderr") for each line of output.
            logs: Folder for the output of the ranks (rank0.log, ...).
            accelerator: Settings of the emulated accelerator (emulate/accelerator.py); None: none.
            grace: Seconds that the other ranks have to end by themselves when one fails.
            cwd: Working directory; None for that of this process.
            gpus: Emulated GPUs of the ranks. The ranks then record their state in the folder Job.watch.
        """
        nodes = list(self.nodes) if order is None else [self._node(name) for name in order]
        ranks.check_order(nodes)
        counts = ranks.processes_of_nodes(nodes, processes)
        common, emulated = ranks.common_environment(env or {}, accelerator)
        port, directory, watch = next(self._ports), str(cwd or os.getcwd()), None
        if gpus is not None:
            total = gpus.check(max(counts), sum(counts), common)
            holmes = ranks.asks_for_holmes(command, common)
            watch = self.directory / "gpu" / str(port)
            watch.mkdir(parents=True)
            common |= gpus.environment(common, total, nodes, holmes, watch)
        argv = list(command)
        server_control = None  # socket of the preloaded Python, if there is one
        if preload:
            script = fork_server.script_of(argv)
            if script is None:
                wanted = "`python SCRIPT ...` or `python -m MODULE ...`"
                raise HolmesError(
                    f"--preload: the command must be {wanted}, not {' '.join(argv[:2])!r}"
                )
            argv = script[1]
            server_control = self._fork_server(script[0], tuple(preload), common, directory)
        messages: list[dict[str, Any]] = []
        for rank, position in enumerate(ranks.nodes_of_ranks(counts)):
            node = nodes[position]
            env = {
                **common,
                **ranks.rank_environment(nodes, counts, rank, port),
                **self.variables(node.name),
                "HOLMES_LAB_RANK": str(rank),
            }
            env |= gpus.variables_of_node(node.cluster, counts[position]) if gpus else {}
            messages.append(self._message(rank, node.name, argv, env, directory))
        return self._job(
            messages,
            server_control,
            on_line=on_line,
            logs=logs and Path(logs),
            timeout=timeout,
            grace=grace,
            emulated=emulated,
            watch=watch,
        )

    def start_programs(
        self,
        programs: Sequence[ranks.Program],
        *,
        timeout: float | None = None,
        on_line: OnLine | None = None,
        logs: Path | None = None,
        grace: float = 5.0,
        cwd: str | Path | None = None,
    ) -> Job:
        """Start programs that are no ranks of a training job, such as daemons, each on its host.

        The returned Job treats program i of `programs` (from 0) as its rank i.

        Args:
            programs: Each has its host (a node or "login"), its arguments and its environment.
            timeout: Seconds after which all end with status 124; None: no limit.
            on_line: Called in a thread as on_line(i, line, "stdout" or "stderr") for each line.
            logs: Folder for the output of the programs (rank0.log, ...).
            grace: Seconds that the others have to end by themselves when one fails.
            cwd: Working directory; None for that of this process.
        """
        directory = str(cwd or os.getcwd())
        messages = [
            self._message(number, program.host, list(program.argv), dict(program.env), directory)
            for number, program in enumerate(programs)
        ]
        return self._job(
            messages,
            server_control=None,
            on_line=on_line,
            logs=logs and Path(logs),
            timeout=timeout,
            grace=grace,
            emulated=False,
        )

    def _message(
        self, number: int, host: str, argv: list[str], env: dict[str, str], directory: str
    ) -> dict[str, Any]:
        """Return the message that makes a job supervisor (process/launch.py) start one process on a host.

        The process enters the namespaces of the host. The process `holder` keeps them alive.

        Args:
            number: The rank, or the number of a program that is no rank.
            host: Name of a node, or "login".
            argv: Program and arguments.
            env: The whole environment.
            directory: Working directory.
        """
        return {
            "rank": number,
            "holder": self.holder(host),
            "env": env,
            "argv": argv,
            "cwd": directory,
            "realtime": self.realtime,  # run under SCHED_RR, so that other programs delay it less
        }

    def _job(
        self, messages: list[dict[str, Any]], server_control: socket.socket | None, **options: Any
    ) -> Job:
        """Start a job by a job supervisor, a new process that starts the processes of the job.

        Args:
            messages: One message of _message() for each process.
            server_control: Control socket of a fork server, a Python with the job's modules: it forks the
                supervisor, and so these are in all processes of the job. None: the keeper, the owner of the
                lab's processes, forks the supervisor, and each process executes its command.
            options: Further keyword arguments of Job.
        """
        ours, theirs = wire.pair()  # `theirs` is the end for the supervisor
        try:
            if server_control is None:
                self._keeper.ask("job", descriptors=[theirs.fileno()])
            else:
                wire.send(server_control, {}, descriptors=[theirs.fileno()])
            theirs.close()
            return Job(messages, ours, **options)
        except OSError as error:
            # Such as: --logs cannot be written, too many open files, the fork server was killed.
            raise HolmesError(f"lab: the job cannot be started: {error}") from None

    def counters(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return node -> NIC -> (bytes received, bytes sent) since the lab was created."""
        result: dict[str, dict[str, tuple[int, int]]] = {}
        for node in self.nodes:
            bytes_of = namespaces.interface_bytes(self.holder(node.name))
            result[node.name] = {nic.name: bytes_of[nic.name] for nic in node.nics}
        return result

    def set_link(self, node: str, nic: str, up: bool) -> None:
        """Pull the cable of a NIC (up=False), or plug it in again.

        The port of the switch is set down or up, so that the node's NIC loses or gets its carrier.
        """
        link = self._node(node).nic(nic)
        self._tool(_SWITCH, "ip", f"link set dev {link.port} {'up' if up else 'down'}\n")
        sysfs_tree.set_link(self.sysfs(node), link, up)

    def set_silent(self, node: str, nic: str, silent: bool) -> None:
        """Let a NIC lose all frames although its link stays up (silent=True), or end this.

        The port of the switch is taken out of its bridge, or put back into it.
        """
        link = self._node(node).nic(nic)
        self._tool(
            _SWITCH,
            "ip",
            f"link set dev {link.port} {'nomaster' if silent else f'master {link.bridge}'}\n",
        )

    def configure(self, node: str, line: str) -> None:
        """Run one `ip` command on a node, for example "addr add 10.0.0.1/8 dev eth0"."""
        self._tool(node, "ip", f"{line}\n")

    def rename(self, node: str, names: Mapping[str, str], hca: str) -> None:
        """Rename the NICs and the RDMA device (HCA) of a node, as if another machine replaced it.

        Args:
            node: Name of a node with at most one fast NIC, since all HCAs get the same name.
            names: Old -> new name of a NIC, for example {"roce0": "ens6np0"}. Others keep their names.
            hca: New name of the HCA.
        """
        old_node = self._node(node)
        new_nics = []
        for nic in old_node.nics:
            new_name = names.get(nic.name, nic.name)
            new_nics.append(replace(nic, name=new_name, hca=hca))  # Ethernet NICs have no HCA
            if new_name != nic.name:
                self._tool(
                    node,
                    "ip",
                    f"link set dev {nic.name} down\n"
                    f"link set dev {nic.name} name {new_name}\n"
                    f"link set dev {new_name} up\n",
                )
        new_node = replace(old_node, nics=tuple(new_nics))
        self._by_name[node] = new_node
        self.hosts = tuple(self._by_name.values())
        self.nodes = self.hosts[: len(self.nodes)]  # "login" is the last of the hosts
        shutil.rmtree(self.sysfs(node))  # the folder that stands for the node's /sys
        sysfs_tree.write_tree(self.sysfs(node), new_node)  # the same with the new names

    def set_rate(self, node: str, nic: str, bps: int) -> None:
        """Limit a NIC to a rate in bits/s in both directions.

        The rate is not multiplied by `scale`. The rate that sysfs shows does not change.
        """
        link = self._node(node).nic(nic)
        # The node limits what the NIC sends, and the switch limits what it receives.
        for host, device in ((node, link.name), (_SWITCH, link.port)):
            packet_size, rate = network.shape_commands(device, bps)  # a line for ip, one for tc
            self._tool(host, "ip", packet_size + "\n")
            self._tool(host, "tc", rate + "\n")

    def variables(self, host: str) -> dict[str, str]:
        """Return the environment variables that describe a node, or the host "login", to its processes."""
        cluster = self._node(host).cluster
        return {
            "HOLMES_SYSFS": str(self.sysfs(host)),
            "HOLMES_LAB_NODE": host,
            "HOLMES_LAB_CLUSTER": cluster,
            "HOLMES_LAB_SCALE": f"{self.scale:g}",
        }

    def sysfs(self, node: str) -> Path:
        """Return the folder that stands for /sys on a node."""
        return self.directory / "sysfs" / node

    def holder(self, node: str, inside: bool = False) -> int:
        """Return the PID of the holder of a node's namespaces, for `nsenter -t PID -n -u -m`.

        Args:
            node: Name of a node, or "login". The holder is a process that keeps these namespaces.
            inside: True: the PID in the lab's PID namespace; False: the PID that this process sees.
        """
        pids = self._holders[self._node(node).name]
        return pids.pid_in_lab if inside else pids.pid

    def _node(self, name: str) -> network.LabNode:
        """Return a node, or raise HolmesError if there is none with this name."""
        if name not in self._by_name:
            raise HolmesError(
                f"{self.spec.source}: no node {name!r}; it has {', '.join(self._by_name)}"
            )
        return self._by_name[name]

    def _start_keeper(self) -> None:
        """Start the keeper, the process that owns all other processes of the lab (process/keeper.py)."""
        owner = state.identity(os.getpid())
        # Entries of state.json: by these, `holmes lab down` and `holmes lab shell` find this lab.
        self._state = {"owner": owner, "source": self.spec.source, "nodes": list(self._by_name)}
        state.record(self.directory, keeper=state.NO_PROCESS, **self._state)
        self._keeper = KeeperProcess(self.directory)
        self._state["keeper"] = state.identity(self._keeper.pid)
        state.record(self.directory, **self._state)
        self._init_pid = self._keeper.wait_until_ready()  # init of the lab's PID namespace

    def _make_nodes(self) -> None:
        """Create the nodes and the networks between them, and record the nodes in state.json.

        Each node gets Linux namespaces and a folder that imitates /sys. Bridges in another
        namespace (the switch) connect the NICs. For links between clusters, a process that delays
        their frames (the delay line) is started.
        """
        self._make_namespaces()
        # `ip` runs in the PID namespace of the lab, and takes PIDs of that namespace.
        inner_pids = {name: self.holder(name, inside=True) for name in self._by_name}
        batches = {_SWITCH: network.switch_batches(self.hosts, inner_pids)}
        batches.update({node.name: network.node_batches(node) for node in self.hosts})
        for host, (ip, tc) in batches.items():
            self._tool(host, "ip", ip)
            self._tool(host, "tc", tc)
        if self.spec.wan:  # there are links between clusters, with latencies or uplinks
            self._start_delay_line()
        # `holmes lab shell` enters the namespaces of a host by the PID of their holder.
        shell_entries = {
            name: [state.identity(self.holder(name)), self.variables(name)]
            for name in self._by_name
        }
        state.record(self.directory, **self._state, hosts=shell_entries)

    def _make_namespaces(self) -> None:
        """Create the namespaces and the sysfs tree of each host."""
        hosts, nsswitch = self.directory / "hosts", self.directory / "nsswitch.conf"
        hosts.write_text(network.hosts_file(self.hosts))
        # Names are looked up in files only, because a node reaches no name server.
        nsswitch.write_text("passwd: files\ngroup: files\nhosts: files\n")
        sysctl = dict(self.sysctl)
        has_rails = any(len(node.fast_nics) > 1 for node in self.nodes)
        if has_rails:
            # By default, each NIC would answer ARP requests for the others in its subnet.
            sysctl = {**network.RAILS_SYSCTL, **sysctl}
        for node in self.hosts:
            answer = self._keeper.ask(
                "node", name=node.name, hosts=str(hosts), nsswitch=str(nsswitch), sysctl=sysctl
            )
            self._holders[node.name] = wire.HolderPids(*answer["pids"])
            sysfs_tree.write_tree(self.sysfs(node.name), node)

    def _start_delay_line(self) -> None:
        """Start and connect the delay line, the process that emulates the links between clusters.

        The keeper, the process that owns all other processes of the lab, forks it. A TAP device
        connects it to the Ethernet bridge of each cluster, in the network namespace of the switch.
        """
        addresses = [
            inter_cluster.NodeAddress(
                ip=node.address, cluster=node.ethernet_segment, mac=node.nics[0].mac
            )
            for node in self.hosts
        ]
        settings = inter_cluster.delay_line(
            self.spec, self.scale, addresses, network.WIRE_BITS_PER_DATA_BIT
        )
        answer = self._keeper.ask("wan", **settings)  # Keeper.do_wan() forks the delay line
        self.delay_line = wire.HolderPids(*answer["pids"]).pid
        # Commands of `ip` that attach the TAP devices to the bridges.
        tap_lines = inter_cluster.tap_lines(len(settings["clusters"]))
        self._tool(_SWITCH, "ip", "".join(f"{line}\n" for line in tap_lines))

    def _tool(self, host: str, tool: str, batch: str) -> None:
        """Run a batch of commands of `ip` or `tc` in the network namespace of a host.

        Args:
            host: Name of a node, or _SWITCH.
            tool: "ip" or "tc".
            batch: Commands, each on a line without the name of the tool.
        """
        answer = self._keeper.ask(
            "tool", name=host, argv=[self._tools[tool], "-batch", "-"], text=batch
        )
        if answer["status"] != 0:
            raise HolmesError(
                f"lab: `{tool}` failed on {host or 'the switch'}: {answer['error'].strip()}"
            )

    def _fork_server(
        self, interpreter: str, modules: tuple[str, ...], env: dict[str, str], directory: str
    ) -> socket.socket:
        """Return the control socket of a fork server. It is started if there is none yet.

        A fork server is a Python in the lab that imports modules once, and then forks ranks. With
        Lab.templates, it is forked from a template, a Python outside of the labs with the same
        imports. Otherwise the keeper (the process that owns the lab's processes) starts it as a new Python.

        Args:
            interpreter, modules: Path of the Python, and names of the modules that it imports.
            env, directory: Environment and working directory of the ranks.
        """
        env = preload_environment(env)
        key = TemplateKey(interpreter, modules, tuple(sorted(env.items())), directory)
        if key not in self._fork_servers:
            log = self.directory / f"preload{len(self._fork_servers)}.log"
            control = None
            if self.templates is not None:
                control = self.templates.fork_server(key, PACKAGE_FOLDERS, self._init_pid, log)
            if control is None:  # no template, or it cannot enter this lab's user namespace
                # PACKAGE_FOLDERS: folders from which this Python imports holmes_lab and holmes_ext.
                argv = [interpreter, "-c", fork_server.BOOT, PACKAGE_FOLDERS, ",".join(modules)]
                start_process = partial(
                    self._keeper.ask, "fork_server", argv=argv, env=env, cwd=directory
                )
                control = fork_server.start(start_process, log, modules)
            self._fork_servers[key] = control
        return self._fork_servers[key]
