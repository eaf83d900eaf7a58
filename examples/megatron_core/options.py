"""Parses and checks the script's options."""

import argparse
import os
import sys


class Parser(argparse.ArgumentParser):
    """Argument parser that prints an error in one line, once for each node."""

    def error(self, message):
        """Print an error of the command line, and exit with status 2."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"usage: {self.prog} [options]: {message} (--help lists the options)",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(2)


def at_least(minimum, kind=int):
    """Return an argparse type: a number that is not below a minimum.

    Args:
        minimum: The lowest number that is accepted.
        kind: int or float.
    """

    def parse(text):
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
        return value

    parse.__name__ = kind.__name__
    return parse


def build_parser() -> Parser:
    """Return the parser of the script's options."""
    parser = Parser(
        prog="train.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a byte-level GPT with megatron-core on the text of pydoc_data.topics.",
    )
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(1),
        default=100,
        help="number of optimizer steps, including those of a loaded checkpoint",
    )
    add("--tensor", type=at_least(1), default=1, help="tensor-parallel size")
    add("--pipeline", type=at_least(1), default=1, help="pipeline stages")
    add(
        "--virtual-pipeline",
        type=at_least(1),
        default=1,
        metavar="N",
        help="model chunks on each stage (interleaved schedule)",
    )
    add(
        "--context",
        type=at_least(1),
        default=1,
        help="context-parallel size (needs Transformer Engine)",
    )
    add(
        "--experts",
        type=at_least(0),
        default=0,
        help="experts in each layer, two of which process a token (0: an ordinary MLP)",
    )
    add(
        "--expert",
        type=at_least(1),
        default=1,
        help="expert-parallel size, in which the experts are split over data-parallel ranks",
    )
    add("--layers", type=at_least(1), default=4, help="transformer layers")
    add("--hidden", type=at_least(1), default=128, help="width of a token's vector")
    add("--heads", type=at_least(1), default=4, help="attention heads")
    add("--sequence", type=at_least(1), default=128, help="bytes in a sample")
    add(
        "--micro-batch",
        type=at_least(1),
        default=4,
        help="samples in a micro-batch of one data-parallel rank",
    )
    add("--micro-batches", type=at_least(1), default=4, help="micro-batches in a step")
    add(
        "--layout",
        help="layers of each stage in megatron-core's notation, as in 'Ettt|tL' (default: equal "
        "stages)",
    )
    add(
        "--recompute",
        choices=("selective", "uniform", "block"),
        help="recompute attention, or whole layers in units or one by one (default: keep all activations)",
    )
    add(
        "--recompute-layers",
        type=at_least(1),
        default=1,
        metavar="N",
        help="layers of a unit (uniform), or layers of each stage that are recomputed (block)",
    )
    add(
        "--distributed-optimizer",
        action="store_true",
        help="optimizer state split over the data-parallel ranks",
    )
    add("--instances", type=at_least(1), default=1, help="distributed-optimizer instances")
    add(
        "--overlap",
        action="store_true",
        help="gradients (and, with the distributed optimizer, weights) travel during computation",
    )
    add(
        "--bucket-size",
        type=at_least(1),
        metavar="N",
        help="elements reduced at once under --overlap (default: megatron-core's)",
    )
    add("--tied", action="store_true", help="the head shares the embedding's weight")
    add(
        "--order",
        default="tp-cp-ep-dp-pp",
        help="order of the parallel dimensions in the ranks, innermost first",
    )
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--lr", type=at_least(0, float), default=1e-3, help="learning rate of AdamW")
    add(
        "--clip",
        type=at_least(0, float),
        default=1.0,
        help="gradient norm above which gradients are scaled down; 0: never",
    )
    add(
        "--seed",
        type=at_least(0),
        default=1,
        help="seed of the initial weights and of the data order",
    )
    add("--save", metavar="DIR", help="write a checkpoint into DIR at the end")
    add(
        "--save-every",
        type=at_least(0),
        default=0,
        metavar="N",
        help="also write a checkpoint every N steps",
    )
    add(
        "--load",
        metavar="DIR",
        help="resume from the latest checkpoint in DIR, also if the model was split differently",
    )
    add(
        "--log-file",
        "--log",
        metavar="FILE",
        dest="log",
        # torchrun reads --log as an abbreviation of its option --log-dir
        help="write a JSON line for each step: step, loss, grad_norm, seconds, tokens_per_second",
    )
    return parser


def parse_args(argv=None) -> tuple[argparse.Namespace, Parser]:
    """Return the checked options, and the parser.

    The caller reports errors that it finds later by the parser's method error().
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", 1))
    ranks_of_model = args.tensor * args.pipeline * args.context
    if world % ranks_of_model:
        parser.error(
            f"a world size of {world} processes is not divisible by --tensor x --pipeline x --context = "
            f"{ranks_of_model}"
        )
    if args.hidden % args.heads or args.heads % args.tensor:
        parser.error(
            f"--hidden {args.hidden} must be divisible by --heads {args.heads}, and those by --tensor "
            f"{args.tensor}"
        )
    stages = args.pipeline * args.virtual_pipeline
    if args.virtual_pipeline > 1 and args.pipeline == 1:
        parser.error(f"--virtual-pipeline {args.virtual_pipeline} needs --pipeline 2 or more")
    if args.virtual_pipeline > 1 and args.micro_batches % args.pipeline:
        parser.error(
            f"--virtual-pipeline needs --micro-batches {args.micro_batches} to be divisible by"
            f" --pipeline {args.pipeline}"
        )
    if args.layout is None and args.layers % stages:
        parser.error(f"--layers {args.layers} are not divisible by {stages} stages; give --layout")
    ranks_of_stage = world // args.tensor // args.pipeline
    divides_experts = args.experts > 1 and args.experts % args.expert == 0
    divides_ranks = ranks_of_stage % args.expert == 0
    if args.expert > 1 and not (divides_experts and divides_ranks):
        parser.error(
            f"--expert {args.expert} must divide --experts {args.experts} and"
            f" the {ranks_of_stage} ranks of a stage"
        )
    if args.instances > 1 and not args.distributed_optimizer:
        parser.error("--instances needs --distributed-optimizer")
    if args.save_every and not args.save:
        parser.error(f"--save-every {args.save_every} needs --save DIR")
    return args, parser
