"""Lists the combinations of versions that benchmarks/matrix.py tests holmes with, and their tests.

A combination is called a row, since it is a row of a table in docs/versions.md. There is a table for each
kind of row:

    torch        versions of torch
    deepspeed    versions of DeepSpeed
    megatron     versions of megatron-core, and of DeepSpeed under Megatron-DeepSpeed
    pair         versions of torch, each with several frameworks that were released at that time
"""

from __future__ import annotations

from dataclasses import dataclass

#: Training jobs that matrix_lab.py measures on emulated clusters: the pipelines of DeepSpeed and
#: megatron-core on 2 + 2 nodes, the others on 4 + 4.
CASES = ("deepspeed", "megatron-core", "Trainer", "FSDP2", "Megatron-DeepSpeed")


@dataclass(frozen=True)
class Row:
    """Combination of versions that matrix.py installs, and the tests that it then runs.

    It is a row of a table in docs/versions.md. (A harness.Row is something else: a measured value.)
    """

    name: str
    kind: str  # the table that shows the row
    packages: tuple[str, ...] = ()  # that pip installs, e.g. "deepspeed==0.18.1"
    #: Requirement of torch for pip, e.g. "torch==2.9.1". If it is "", torch and all packages that are not in
    #: `packages` are taken from the environment that runs matrix.py.
    torch: str = ""
    python: str = ""  # version, e.g. "3.12"; "": the Python that runs matrix.py
    source: str = (
        ""  # tag or branch of the Megatron-LM clone (tests/checkouts.py); "": Megatron is a package
    )
    features: tuple[str, ...] = ("torch",)  # packages; the features of holmes for them are counted
    tests: tuple[str, ...] = ()  # files and options of pytest
    #: The same for `make old-versions`, which runs often: a few tests that take minutes.
    few: tuple[str, ...] = ()
    lab: tuple[str, ...] = ()  # names from CASES
    nccl: tuple[str, ...] = ()  # tests over NCCL on emulated GPUs, with the runtime of CUDA 13
    #: torchtitan and its packages, for a separate folder (requirements/torchtitan.txt gives the reason).
    torchtitan: tuple[str, ...] = ()

    def __post_init__(self):
        assert "," not in self.name, (
            f"{self.name}: --cases (ROWS of make matrix) is split at commas"
        )


#: Tests that weights or losses equal those of stock (the job without holmes), for each feature of holmes for
#: torch: NICs, DDP, FSDP, pipelining, joined jobs and telemetry.
TORCH_TESTS = (
    "tests/patches/torch",
    "tests/runtime/measure/test_telemetry.py",
    "tests/join/test_stacks_of_torch.py",
    "integration_tests/stacks/test_trainer_joined.py::test_trainers_read_different_parts",
    "integration_tests/stacks/test_pipelining.py::test_losses_are_stock_s[breadth first]",
)
#: The same for users' scripts on emulated clusters, and tests of the bytes between the clusters.
SCRIPT_TESTS = (
    *(f"integration_tests/stacks/test_{name}.py" for name in ("fsdp2", "pipelining")),
    "integration_tests/stacks/test_trainer.py::test_losses_are_stock_s_and_only_sums_cross",
)
#: Tests of torch's features that can run over NCCL: reductions, overlap, hierarchical all-reduce, compressed
#: activations, scripts.
NCCL_TESTS = (
    *(
        f"tests/runtime/reduce/test_{name}.py"
        for name in ("compress", "reducer", "tied", "hierarchical")
    ),
    "tests/runtime/groups/test_wire.py",
    *(f"integration_tests/stacks/test_{name}.py" for name in ("pipelining", "fsdp2", "trainer")),
)
DEEPSPEED_TESTS = tuple(
    f"integration_tests/deepspeed/test_{name}.py"
    for name in ("overlap", "zero", "partition", "resume", "two_clusters", "joined")
)
MEGATRON_TESTS = tuple(
    f"integration_tests/megatron/test_{name}.py"
    for name in ("core", "experts", "joined", "slices", "megatron_lm")
)
PRETRAIN_TESTS = (
    "integration_tests/megatron_deepspeed",
    "-k",
    "same_losses or overlapped or pass_between",
)
#: Tests that .ci/run runs with an old version of a framework.
FEW_DEEPSPEED = tuple(
    f"integration_tests/deepspeed/test_{name}.py" for name in ("overlap", "resume")
)
FEW_MEGATRON = (
    "integration_tests/megatron/test_core.py",
    "-k",
    "every_split or leave_ethernet or built_once",
)
#: Tests of a pair: the losses of each engine, and faults that a framework can cause in another.
FEW_PAIR = (FEW_DEEPSPEED[0], "integration_tests/megatron/test_core.py", SCRIPT_TESTS[-1])
PAIR_TESTS = (
    "tests/patches",
    *FEW_DEEPSPEED,
    "integration_tests/megatron/test_core.py",
    *SCRIPT_TESTS,
)
#: Tests that new versions are likely to break: the patches, each row of README's table, and the unmodified
#: pretrain_gpt.py of both Megatrons.
NEXT_TESTS = (
    "tests/patches",
    "integration_tests/rows",
    "integration_tests/megatron_deepspeed",
    "integration_tests/megatron/test_megatron_lm.py",
    "integration_tests/megatron/test_core.py",
    "integration_tests/deepspeed/test_overlap.py",
)
OLD, MIDDLE, TODAY = (
    ("transformers==4.51.3", "accelerate==1.6.0"),
    ("transformers==4.57.1", "accelerate==1.11.0"),
    ("transformers==5.23.0", "accelerate==1.15.0"),
)
EVERYTHING = ("deepspeed==0.19.8", "megatron-core==0.16.1", *TODAY, "lightning==2.6.6")
ALL = ("torch", "deepspeed", "megatron-core", "transformers", "lightning")


def _pair(name: str, torch: str, *packages: str, **more) -> Row:
    """Return a row: one version of torch with several frameworks that were released at that time.

    matrix.py installs such a combination, and tests whether a framework breaks another.

    Args:
        name: Name of the row.
        torch: Version of torch.
        packages: Requirements of the frameworks, such as "deepspeed==0.18.1".
        more: Fields of Row. They replace the defaults: the tests PAIR_TESTS, the few tests FEW_PAIR
            (for `make old-versions`), and four training jobs on emulated clusters (`lab`).
    """
    features = tuple(
        project
        for project in ALL
        if project == "torch" or any(package.startswith(f"{project}==") for package in packages)
    )
    defaults = {
        "features": features,
        "tests": PAIR_TESTS,
        "few": FEW_PAIR,
        "lab": ("deepspeed", "megatron-core", "Trainer", "FSDP2"),
    }
    return Row(name, "pair", packages, f"torch=={torch}", **{**defaults, **more})


def _torch(version: str, packages: tuple[str, ...]) -> Row:
    """Return a row: one version of torch, with the tests that matrix.py runs with it.

    All versions run the tests. Training jobs on emulated clusters (Row.lab) take long, and run only
    with the oldest, a middle and the newest version. Tests over NCCL (Row.nccl) use emulated GPUs with the
    runtime of CUDA 13. A single version of torch with CUDA 13 runs them.

    Args:
        version: Version of torch.
        packages: Requirements of transformers and accelerate that fit it.
    """
    lab = ("Trainer", "FSDP2") if version in ("2.6.0", "2.9.1", "2.15.0") else ()
    return Row(
        f"torch {version}",
        "torch",
        packages,
        f"torch=={version}",
        features=("torch", "transformers"),
        tests=TORCH_TESTS,
        lab=lab,
        nccl=NCCL_TESTS if version == "2.13.0" else (),
    )


def _deepspeed(version: str) -> Row:
    """Return a row of the compatibility table: a version of DeepSpeed, and the tests to run with it.

    matrix.py installs the version. It runs the tests of the field `tests`, and the training job that the
    field `lab` names, on emulated clusters. `make old-versions` runs only the tests of the field `few`.

    Args:
        version: Version of DeepSpeed, such as "0.18.9".
    """
    return Row(
        f"deepspeed {version}",
        "deepspeed",
        (f"deepspeed=={version}",),
        features=("deepspeed",),
        tests=DEEPSPEED_TESTS,
        few=FEW_DEEPSPEED,
        lab=("deepspeed",),
    )


def _megatron(version: str, source: str = "") -> Row:
    """Return a row of the compatibility table: a version of megatron-core, and the tests to run with it.

    matrix.py installs the version. It runs the tests of the field `tests`, and the training job that the
    field `lab` names, on emulated clusters. `make old-versions` runs only the tests of the field `few`.

    Args:
        version: Version of megatron-core.
        source: A tag or branch of Megatron-LM; "": the package from PyPI.
    """
    packages = () if source else (f"megatron-core=={version}",)
    return Row(
        f"megatron-core {version}",
        "megatron",
        packages,
        source=source,
        features=("megatron-core",),
        tests=MEGATRON_TESTS,
        few=FEW_MEGATRON,
        lab=("megatron-core",),
    )


def _pretrain(version: str, *packages: str) -> Row:
    return Row(
        f"Megatron-DeepSpeed with deepspeed {version}",
        "megatron",
        (f"deepspeed=={version}", *packages),
        features=("deepspeed",),
        tests=PRETRAIN_TESTS,
        lab=("Megatron-DeepSpeed",),
    )


ROWS = {
    row.name: row
    for row in (
        # NVIDIA's containers have builds of their own of these torches
        # (2.7.0a0+79aa17489c, 2.9.0a0+145a3a7bda), and the megatron-core of those months stands beside them
        _pair(
            "oldest supported",
            "2.6.0",
            "deepspeed==0.14.5",
            "megatron-core==0.11.0",
            *OLD,
            python="3.10",
        ),
        _pair(
            "NVIDIA's 25.04 container",
            "2.7.1",
            "deepspeed==0.16.7",
            "megatron-core==0.12.3",
            *OLD,
            "lightning==2.5.1",
            python="3.12",
        ),
        _pair(
            "NVIDIA's 25.10 container",
            "2.9.1",
            "deepspeed==0.18.1",
            "megatron-core==0.14.0",
            *MIDDLE,
            "lightning==2.5.5",
            python="3.12",
        ),
        _pair("pip install today", "2.15.0", *EVERYTHING, python="3.12"),
        _pair(
            "Megatron-LM's main with torch of today",
            "2.15.0",
            *TODAY,
            python="3.12",
            source="main",
            features=("torch", "megatron-core"),
            tests=MEGATRON_TESTS,
            lab=("megatron-core",),
        ),
        *(
            _pair(
                f"Python {python} with torch of today", "2.15.0", *EVERYTHING, python=python, lab=()
            )
            for python in ("3.10", "3.13", "3.14")
        ),
        *(_torch(version, OLD) for version in ("2.6.0", "2.7.1", "2.8.0")),
        *(_torch(version, MIDDLE) for version in ("2.9.1", "2.10.0", "2.11.0", "2.12.1")),
        *(_torch(version, TODAY) for version in ("2.13.0", "2.14.1", "2.15.0")),
        *map(
            _deepspeed,
            (
                "0.14.5",
                "0.15.4",
                "0.16.0",
                "0.16.9",
                "0.17.0",
                "0.17.6",
                "0.18.0",
                "0.18.9",
                "0.19.0",
                "0.19.8",
            ),
        ),
        *map(_megatron, ("0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")),
        *(_megatron(version, f"core_v{version}") for version in ("0.17.1", "0.18.2", "0.19.0")),
        _megatron("0.20.0", "main"),
        # with its dependency torchvision (any will do: a GPT does not use it), and without: holmes serves
        # that, too
        _pretrain("0.18.9", "torchvision==0.16.0"),
        _pretrain("0.19.8"),
    )
}
#: torchtitan, the packages of requirements/torchtitan.txt, and two that torchtitan requires since 0.3.
NEXT_TORCHTITAN = (
    "torchtitan",
    "torchdata",
    "datasets",
    "pyarrow",
    "pandas",
    "python-dateutil",
    "dill",
    "multiprocess",
    "xxhash",
    "tyro",
    "docstring_parser",
    "typeguard",
    "tensorboard",
    "tensorboard-data-server",
    "absl-py",
    "grpcio",
    "Markdown",
    "protobuf",
    "Werkzeug",
    "spmd_types",
    "torch_checkpointing",
)
#: The newest version of everything. It is no row of the table: `make matrix NEXT=1` runs it.
#: Megatron-DeepSpeed's tools/preprocess_data.py imports nltk.
NEXT = Row(
    "next",
    "next",
    ("deepspeed", "megatron-core", "transformers", "accelerate", "lightning", "nltk"),
    "torch",
    features=ALL,
    tests=NEXT_TESTS,
    torchtitan=NEXT_TORCHTITAN,
)
