"""Parses and checks the script's options, and makes the DeepSpeed configuration from them."""

import argparse
import json
import os
import re
import sys
from pathlib import Path


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
        description="Train a byte-level GPT with DeepSpeed's pipeline engine on pydoc_data.topics.",
    )
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(1),
        default=100,
        help="number of optimizer steps, including those of a loaded checkpoint",
    )
    add(
        "--stages",
        type=at_least(1),
        default=1,
        help="pipeline stages; the other ranks are data-parallel",
    )
    add("--layers", type=at_least(1), default=4, help="transformer blocks")
    add("--hidden", type=at_least(1), default=128, help="width of a token's vector")
    add("--heads", type=at_least(1), default=4, help="attention heads")
    add("--sequence", type=at_least(1), default=128, help="bytes in a sample")
    add("--micro-batch", type=at_least(1), default=4, help="samples in a micro-batch of one rank")
    add(
        "--micro-batches",
        type=at_least(1),
        default=4,
        help="micro-batches in a step (gradient accumulation)",
    )
    add("--lr", type=at_least(0, float), default=1e-3, help="learning rate of AdamW")
    add(
        "--seed",
        type=at_least(0),
        default=1,
        help="seed of the initial weights and of the data order",
    )
    add("--tied", action="store_true", help="the head shares the embedding's weight")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--zero", type=int, choices=(0, 1), default=0, help="ZeRO stage")
    add(
        "--partition-method",
        default="type:Block",
        help="how DeepSpeed splits the layers: uniform, parameters or type:REGEX of layer classes",
    )
    add(
        "--activation-checkpoint",
        type=at_least(0),
        default=0,
        metavar="N",
        help="recompute activations in groups of N layers; 0: keep all activations",
    )
    add("--save", metavar="DIR", help="write a checkpoint into DIR at the end")
    add(
        "--save-every",
        type=at_least(0),
        default=0,
        metavar="N",
        help="also write a checkpoint every N steps",
    )
    add("--load", metavar="DIR", help="resume from the latest checkpoint in DIR")
    add(
        "--log-file",
        "--log",
        metavar="FILE",
        dest="log",
        # torchrun reads --log as an abbreviation of its option --log-dir
        help="write a JSON line for each step: step, loss, seconds, tokens_per_second",
    )
    add(
        "--deepspeed_config",
        metavar="FILE",
        help="DeepSpeed configuration (JSON); its keys replace those that this script sets",
    )
    # The deepspeed launcher passes it. It is not read: the variable LOCAL_RANK has the same value.
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def parse_args(argv=None) -> tuple[argparse.Namespace, Parser]:
    """Return the checked options, and the parser.

    The caller reports errors that it finds later by the parser's method error().
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", 1)))
    if world % args.stages:
        parser.error(
            f"a world size of {world} processes is not divisible by --stages {args.stages}"
        )
    if args.layers < args.stages:
        parser.error(f"--layers {args.layers} are too few for --stages {args.stages}")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not divisible by --heads {args.heads}")
    is_by_type = args.partition_method.startswith("type:")
    if not is_by_type and args.partition_method not in ("uniform", "parameters"):
        parser.error(
            f"--partition-method {args.partition_method} is none of uniform, parameters, type:REGEX"
        )
    try:
        re.compile(args.partition_method)
    except re.error as error:
        parser.error(f"--partition-method {args.partition_method}: {error}")
    if args.save_every and not args.save:
        parser.error(f"--save-every {args.save_every} needs --save DIR")
    args.overrides = {}  # keys of the DeepSpeed configuration
    try:
        if args.deepspeed_config:
            args.overrides = json.loads(Path(args.deepspeed_config).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--deepspeed_config {args.deepspeed_config}: {error}")
    return args, parser


def deepspeed_config(args) -> dict:
    """Return DeepSpeed's configuration.

    Keys of the file --deepspeed_config replace the script's choices. Gradient clipping is off. DeepSpeed's
    default is to clip to a norm of 1.0. Under pipeline parallelism without ZeRO, deepspeed 0.19.8 uses the
    norm of the first stage as the model's norm, so training would depend on the number of stages.
    """
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": args.lr,
                "betas": [0.9, 0.95],
                "weight_decay": 0.0,
                "torch_adam": True,
            },
        },
        "gradient_clipping": 0.0,
        # In effect never, because the progress bar shows the loss. None needs DeepSpeed 0.16 or newer.
        "steps_per_print": 10**9,
    }
    if args.zero:
        # The default buckets have 5e8 elements, which DeepSpeed allocates for small models, too.
        config["zero_optimization"] = {
            "stage": 1,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 5_000_000,
        }
    if args.dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if args.zero:  # without ZeRO, DeepSpeed accepts no other accumulation type than the model's
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    batch_keys = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    }
    if batch_keys & set(args.overrides):
        # DeepSpeed derives the missing keys from those that the user gives.
        del config["train_micro_batch_size_per_gpu"]
        del config["gradient_accumulation_steps"]
    return config | args.overrides
