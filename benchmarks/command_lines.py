"""Counts how much holmes understands of the example scripts of Megatron-LM and Megatron-DeepSpeed.

    python benchmarks/command_lines.py --json benchmarks/results/command_lines.json

This program uses the scripts that train a GPT, Llama or MoE model. From the command line of each script,
holmes reads the model and its parallel layout. Then it predicts the time of a training step. Counted are:

    command lines   their total number, and the number whose model holmes understands
    layouts         those for which holmes predicts a time
    flags           Keys of DeepSpeed's configuration file count, too. Each flag is of exactly one kind:
                    - holmes reads it
                    - holmes does not read it, and prints a message that says so
                    - it changes neither the time of a step nor the memory
                    - holmes does not know it

Nothing is trained. Only those shell scripts run that compose a command line (example_scripts.py). Both
checkouts are needed (tests/checkouts.py says where).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from example_scripts import command_lines
from harness import Row, chosen_cases, find_checkout, finish, parser, tell, why_missing

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.command_line.describe import CommandLine, describe
from holmes_ext.patches.megatron.command_line.flags import REASON_NOT_COUNTED, SETTING_OF_FLAG
from holmes_ext.patches.megatron.command_line.settings import words_by_flag
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult

#: Name in --cases -> name of the checkout.
CASES = {"megatron-lm": "Megatron-LM", "megatron-deepspeed": "Megatron-DeepSpeed"}
ROOT = Path(__file__).resolve().parents[1]
MAX_REPLICAS = 400  # data-parallel sizes below this are tried; all scripts need far less
#: A script that gets its micro-batch and all other sizes from the script that calls it. No time can be
#: predicted for it.
FROM_ITS_CALLER = "ds_pretrain_gpt_1.3B_dense_base_script.sh"


def checkout(case: str) -> Path:
    """Return the folder of the checkout of Megatron-LM or Megatron-DeepSpeed on this machine.

    Args:
        case: "megatron-lm" or "megatron-deepspeed".

    Raises:
        SystemExit: The checkout is missing. The status is 2.
    """
    repository = CASES[case]
    folder = find_checkout(repository)
    if folder is None:
        tell(f"command_lines.py: {why_missing(repository)}")
        raise SystemExit(2)
    return folder


def two_clusters(world: int) -> Site:
    """Return an InfiniBand and a RoCE cluster with nodes for `world` ranks, connected by Ethernet.

    Nodes have 8 GPUs if there are enough ranks for such a node in each cluster.
    """
    fabrics = (  # name, kind, rate in bits/s, latency in seconds
        Fabric(ETHERNET, kind="ethernet", rate_bps=25 * 10**9, latency_s=3e-5),
        Fabric("ib", kind="ib", rate_bps=200 * 10**9, latency_s=2e-6),
        Fabric("roce", kind="roce", rate_bps=200 * 10**9, latency_s=4e-6),
    )
    nodes_of_cluster = max(1, world // 16)
    gpus_of_node = min(8, world // 2)
    ports_of = {name: (Port(name), Port(ETHERNET)) for name in ("ib", "roce")}
    nodes = []
    for cluster, ports in ports_of.items():
        for number in range(nodes_of_cluster):
            nodes.append(Node(f"{cluster}{number}", cluster, gpus_of_node, ports))
    return Site(tuple(nodes), fabrics)


def priced(description: CommandLine) -> float:
    """Return the predicted seconds of a training step, or 0.0 if there is no prediction for it.

    A closed-form estimate is used, not the planner's slower simulation. The command line does not
    say on how many GPUs it runs. Therefore the function tries the data-parallel sizes in turn,
    from 1, until the job fills the nodes of two equal clusters and a prediction is possible.

    Args:
        description: A command line as holmes reads it: the model, its parallel sizes and its flags.
    """
    assert description.model is not None
    sizes = description.sizes or Sizes()
    ranks_of_replica = sizes.pipeline * sizes.tensor * sizes.context
    trouble: HolmesError | str = "no data-parallel size fits"
    for replicas in range(1, MAX_REPLICAS):
        world = ranks_of_replica * replicas
        # Both clusters have equally many ranks, and whole nodes of 8 GPUs if there are more than
        # 16.
        fills_nodes = world % (2 * 8 if world > 2 * 8 else 2) == 0
        has_expert_groups = replicas * sizes.context * sizes.tensor % sizes.expert == 0
        if not (fills_nodes and has_expert_groups):
            continue
        try:
            complete = sizes.complete(world)
            # The planning problem: networks and model. The global batch size is only for a search over
            # parallel sizes (0: not given). Here the model has the number of micro-batches.
            problem = SearchResult(
                Network(two_clusters(world)),
                description.model,
                global_batch=0,
                rules=Rules(overlap=True),
            )
            shape = shape_of(
                description.model, complete, zero=description.zero, virtual=description.virtual
            )
            # The plan with exactly these parallel sizes.
            planned = layout_candidate(problem, complete, shape, description.stage_layers)
            return planned.formula_s
        except HolmesError as error:
            trouble = error
    tell(f"not priced: {trouble}")
    return 0.0


def measure(case: str) -> list[Row]:
    """Count the command lines and the flags in the example scripts of a repository.

    Every flag is of one of four kinds, each with a row:

        with an effect       holmes reads the flag
        named as not read    holmes prints that it does not read the flag
        change nothing       known to change neither the step time nor the memory
        unknown              in no list of holmes

    Unknown flags, and scripts with an unknown model, are printed on stderr.

    Args:
        case: "megatron-lm" or "megatron-deepspeed".
    """
    with tempfile.TemporaryDirectory() as configs:
        lines = command_lines(checkout(case), Path(configs))
        descriptions = [describe(argv) for _, argv in lines]
        flags = Counter(flag for _, argv in lines for flag in words_by_flag(argv))
    unknown = set()
    with_model = []
    for (script, _), description in zip(lines, descriptions):
        unknown.update(description.unknown)
        if description.model is not None:
            with_model.append(description)
        elif Path(script).name != FROM_ITS_CALLER:
            tell(f"{script}: {description.trouble or 'no model'}")
    if unknown:
        tell(f"{case}: unknown: {', '.join(sorted(unknown))}")
    step_seconds = [priced(description) for description in with_model]
    steps = [seconds for seconds in step_seconds if seconds]
    effect = [flag for flag in flags if flag in SETTING_OF_FLAG]
    named = [flag for flag in flags if flag in REASON_NOT_COUNTED]
    # The script FROM_ITS_CALLER contains no sizes, so no model can be read from it.
    wanted = len([name for name, _ in lines if Path(name).name != FROM_ITS_CALLER])
    counts = {
        "command lines found": (len(lines), ""),
        "command lines whose model is read": (len(with_model), f">= {wanted}"),
        "layouts that are priced": (len(steps), f">= {wanted}"),
        "flags": (len(flags), ""),
        "flags with an effect": (len(effect), ""),
        "flags named as not read": (len(named), ""),
        "flags that change nothing": (len(set(flags) - {*effect, *named, *unknown}), ""),
        "flags and keys that are unknown": (len(unknown), "<= 0"),
    }
    return [
        Row.of(case, metric, n, unit="", spread=(n, n), emulated=False, target=target)
        for metric, (n, target) in counts.items()
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    args = parser(__doc__.splitlines()[0]).parse_args()
    rows = [row for case in chosen_cases(args.cases, CASES) for row in measure(case)]
    return finish(rows, args.json, "command lines of the Megatrons' example scripts")


if __name__ == "__main__":
    raise SystemExit(main())
