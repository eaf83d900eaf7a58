"""`holmes plan` on a sample, for tests."""

import argparse
from pathlib import Path

from holmes_ext.cli import plan as command

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"


def holmes(*arguments, sample="two_clusters_4"):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", "--cluster", str(EXAMPLES / f"{sample}.toml"), *arguments])
    return args.run(args)
