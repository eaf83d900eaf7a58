"""Trains one job of benchmarks/peers.py: the GPT of examples/plain_torch with AdamW, joined by a library.

    peers_job.py --library none|holmes|torchft|hivemind --name east --seed 1 --steps 200 --log FILE
                 --weights FILE [--where ADDRESS] [--settings TEXT]
    peers_job.py --library torchft --serve --where HOST:PORT            torchft's lighthouse
    peers_job.py --library hivemind --serve                             the first peer of hivemind's DHT

--settings depends on the library:

    holmes      nothing: the coordinator has the settings
    torchft     such as sync_every=20,fragments=1,delay=0,lr=0.7,momentum=0.9
    hivemind    such as steps=32

The log has a line of JSON for each step, with the seconds of the step and of optimizer.step(), in
which all libraries do their work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "plain_torch"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train as example  # noqa: E402

SIZE = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 64}
BATCH = 8  # sequences
LR = 2e-3  # learning rate
#: Seconds after which a silent peer counts as failed, in both libraries.
TIMEOUT_S = 20


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text to train on and the text to evaluate on, as bytes."""
    whole = "\n\n".join(example.topics[name] for name in sorted(example.topics))
    data = torch.frombuffer(bytearray(whole, "utf-8"), dtype=torch.uint8)
    cut = len(data) * 19 // 20
    return data[:cut], data[cut:]


def model() -> nn.Module:
    """Return the GPT, with the same initial weights in every process."""
    torch.manual_seed(0)
    return example.GPT(*SIZE.values())


def evaluate(weights: dict[str, torch.Tensor]) -> float:
    """Return the loss of weights on the text that no job has trained on, in nats for each byte."""
    gpt = model()
    gpt.load_state_dict(weights)
    _, held_out = text()
    tokens = held_out.long()
    rows = tokens[: (len(tokens) - 1) // SIZE["sequence"] * SIZE["sequence"] + 1]
    # The label of a byte is the byte after it.
    inputs, labels = (rows[at : len(rows) - 1 + at].view(-1, SIZE["sequence"]) for at in (0, 1))
    with torch.no_grad():
        return functional.cross_entropy(gpt(inputs).flatten(0, 1), labels.flatten()).item()


def fragments_of(gpt: nn.Module, count: int) -> list[nn.Module]:
    """Return modules that together hold all parameters of a model once (torchft's "fragments").

    Args:
        gpt: The model.
        count: Number of modules.
    """
    if count == 1:
        return [gpt]
    parts = [nn.ModuleList([gpt.embedding, gpt.positions]), *gpt.blocks, nn.ModuleList([gpt.norm])]
    cuts = [len(parts) * k // count for k in range(count + 1)]
    return [nn.ModuleList(parts[a:b]) for a, b in zip(cuts, cuts[1:])]


@contextlib.contextmanager
def torchft_of(args: argparse.Namespace, gpt: nn.Module, inner: torch.optim.Optimizer):
    """Join by torchft's DiLoCo over gloo while this context is open, and yield the optimizer.

    The code follows torchft's train_diloco.py.

    Args:
        args: Options of this program.
        gpt: The model.
        inner: Its optimizer.
    """
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    settings = settings_of(args, sync_every=20, fragments=1, delay=0, lr=0.7, momentum=0.9)
    modules = fragments_of(gpt, settings["fragments"])
    outer = [
        torch.optim.SGD(
            module.parameters(),
            lr=settings["lr"],
            momentum=settings["momentum"],
            nesterov=settings["momentum"] > 0,
        )
        for module in modules
    ]

    def state() -> dict:
        """Return the state of the model and of both optimizers.

        torchft calls this when another job joins, and sends the state to that job.
        """
        return {
            "model": gpt.state_dict(),
            "inner": inner.state_dict(),
            "outer": [optimizer.state_dict() for optimizer in outer],
        }

    def load(saved: dict) -> None:
        """Load the state that state() has returned in another job. torchft has transferred it."""
        gpt.load_state_dict(saved["model"])
        inner.load_state_dict(saved["inner"])
        for optimizer, values in zip(outer, saved["outer"]):
            optimizer.load_state_dict(values)

    host = os.environ["PEERS_ADDRESS"]
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{args.where}",
        replica_id=args.name,
        hostname=host,
    )
    with DiLoCo(
        manager,
        modules,
        inner,
        outer if len(outer) > 1 else outer[0],
        sync_every=settings["sync_every"],
        fragment_sync_delay=settings["delay"],
    ):
        yield inner
    manager.shutdown(wait=False)


def hivemind_dht(*known: str):
    """Return a hivemind DHT that listens on the address of this node.

    Args:
        known: Addresses of other peers.
    """
    import hivemind

    host = f"/ip4/{os.environ['PEERS_ADDRESS']}/tcp/0"
    return hivemind.DHT(start=True, host_maddrs=[host], initial_peers=known)


@contextlib.contextmanager
def hivemind_of(args: argparse.Namespace, gpt: nn.Module, inner: torch.optim.Optimizer):
    """Let a job average its weights with another job by hivemind, and yield the optimizer.

    This is a context manager. It follows hivemind's quick start with local updates. The weights
    are averaged when both jobs together have made 2 x `steps` steps. `steps` is set by the option
    --settings (default: 32).

    Args:
        args: Options of this program.
        gpt: The model.
        inner: Its optimizer.
    """
    import hivemind

    dht = hivemind_dht(args.where)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        batch_size_per_step=BATCH,
        optimizer=inner,
        use_local_updates=True,
        target_batch_size=2 * BATCH * settings_of(args, steps=32)["steps"],
        matchmaking_time=3.0,
        averaging_timeout=10.0,
    )
    optimizer.load_state_from_peers()
    yield optimizer
    optimizer.shutdown()
    dht.shutdown()


def settings_of(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """Return the settings of a library: the defaults, overridden by those in --settings.

    Args:
        defaults: Name of a setting -> default. The default's type converts the text.
        args: Options of this program.
    """
    for part in filter(None, args.settings.split(",")):
        key, _, value = part.partition("=")
        defaults[key] = type(defaults[key])(value)
    return defaults


def serve(args: argparse.Namespace) -> None:
    """Run the server that the two jobs find each other through, and print its address.

    It is torchft's lighthouse, or the first peer of hivemind's distributed hash table. (The server of
    holmes, `holmes join serve`, is another program.)

    Args:
        args: Options of this program: `library` ("torchft" or "hivemind") and `where` (HOST:PORT, for
            the lighthouse).
    """
    if args.library == "torchft":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind=args.where, min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100
        )
        print(f"jobs meet at {server.address()}", flush=True)
    else:
        server = hivemind_dht()
        print(f"jobs meet at {server.get_visible_maddrs()[0]}", flush=True)
    threading.Event().wait()


def train(args: argparse.Namespace) -> None:
    """Train a job, and write a line of JSON for each step into its log."""
    torch.set_num_threads(1)
    if args.library == "holmes":
        import holmes_ext

        holmes_ext.enable(
            join=f"{args.name}@{args.where}", join_invitation=args.invitation, preflight="off"
        )
    gpt = model()
    data, _ = text()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LR)
    if args.library == "torchft":
        joined = torchft_of(args, gpt, optimizer)
    elif args.library == "hivemind":
        joined = hivemind_of(args, gpt, optimizer)
    else:
        joined = contextlib.nullcontext(optimizer)
    shape = argparse.Namespace(seed=args.seed, sequence=SIZE["sequence"], micro_batch=BATCH)
    with open(args.log, "a", buffering=1) as log, joined as optimizer:
        for step in range(args.steps):
            begin = time.perf_counter()
            inputs, labels = example.micro_batch(data, shape, step, torch.device("cpu"))
            optimizer.zero_grad()
            loss = functional.cross_entropy(gpt(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
            time.sleep(args.pace)
            update = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            line = {
                "step": step,
                "at": time.time(),
                "seconds": end - begin,
                "update_s": end - update,
            }
            print(json.dumps({**line, "loss": loss.item()}), file=log)
    torch.save(gpt.state_dict(), args.weights)


def main() -> None:
    """Train a job; with --serve, run the server where jobs find each other instead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--library", choices=("none", "holmes", "torchft", "hivemind"), required=True)
    add("--serve", action="store_true", help="run the server at which the jobs meet; do not train")
    add("--name", default="east", help="name of the job among the joined jobs")
    add("--where", default="", help="address of the server at which the jobs meet")
    add("--settings", default="", help="settings of the library: NAME=VALUE,...")
    add("--invitation", default="", help="holmes: file with the invitation of the job")
    add("--seed", type=int, default=1, help="seed of the order of the text")
    add("--steps", type=int, default=200)
    add(
        "--pace",
        type=float,
        default=0.0,
        help="seconds to sleep in each step, as if an accelerator computed a larger model",
    )
    add("--log", default="/dev/null", help="file for a line of JSON of each step")
    add("--weights", default="/dev/null", help="file for the weights after the last step")
    args = parser.parse_args()
    if args.serve:
        serve(args)
    else:
        train(args)
        sys.stdout.flush()
        if args.library == "torchft":
            os._exit(0)  # its threads would wait for their time-outs


if __name__ == "__main__":
    main()
