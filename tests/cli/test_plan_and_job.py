"""`holmes plan -- COMMAND` and the job of COMMAND make the same decisions, for 40 command lines.

Every integration test compares what real jobs then do with their plan (integration_tests/jobs.py,
follows_plan).
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import clusters
import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.job import plan_request
from holmes_ext.options import parse_flags
from holmes_ext.patches import features
from holmes_ext.patches.engine.registry import disabled_features
from holmes_ext.plan import maker
from holmes_ext.plan.plan import parse_plan

SITES = {
    "two clusters": ("a ib 100Gb/s a[0-1]", "b roce 50Gb/s b[0-1]"),
    "one": ("a ib 100Gb/s a[0-3]",),
}
GPT = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --bf16"
    " --micro-batch-size 2 --global-batch-size 64 --vocab-size 50257"
)
DEEPSPEED = "pretrain_gpt.py --deepspeed --deepspeed_config ds.json " + GPT.partition(" ")[
    2
].replace("--bf16 ", "")
ONE = "--pipeline-model-parallel-size 1"
TWO, TENSOR = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
#: Framework and layout.
JOBS = {
    "megatron data": f"{GPT} {ONE}",
    "megatron pipeline": f"{GPT} {TWO}",
    "megatron tensor": f"{GPT} {TWO} {TENSOR}",
    "megatron sequence parallel": f"{GPT} {TWO} {TENSOR} --sequence-parallel",
    "megatron ZeRO 1": f"{GPT} {ONE} --use-distributed-optimizer --overlap-grad-reduce",
    "megatron interleaved": f"{GPT} {TWO} --num-layers-per-virtual-pipeline-stage 2",
    "megatron-deepspeed": f"{DEEPSPEED} {TWO}",
    "deepspeed": "train.py --deepspeed --deepspeed_config ds.json --holmes-sizes pipeline=2",
    "a script": "train.py --holmes-sizes pipeline=1",
    "a script with stages": "train.py --holmes-sizes pipeline=2,tensor=2",
}
#: What the user asks of holmes, and what is off.
OPTIONS = {
    "as it is": ("", ""),
    "rounded": ("--holmes-compress-activations int8 --holmes-compress-gradients bf16", ""),
    "in flight": ("--holmes-inflight 2 --holmes-overlap on", ""),
    "features off": (
        "--holmes-overlap off",
        "megatron-slices,megatron-stage-links,deepspeed-stage-links,hierarchical,megatron-tied",
    ),
}


def of_the_job(words, off):
    """Return the plan that the job of this command line makes at its start."""
    options, argv = parse_flags(words, {})
    options = replace(options, off=disabled_features({"HOLMES_DISABLE": off}, features()))
    request = plan_request(options, argv)
    request.read_files()
    return request.make_plan([SimpleNamespace(nccl=None)])[1]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", JOBS)
def test_they_decide_the_same(name, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags, off = OPTIONS[options]
    monkeypatch.setenv("HOLMES_DISABLE", off)
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2})
    )
    words = [*JOBS[name].split(), *flags.split(), "--holmes-cluster", "c.toml"]
    for site, lines in SITES.items():
        (tmp_path / "c.toml").write_text(clusters.toml(*lines, ethernet="1Gb/s", processes=2))
        monkeypatch.setattr(maker, "part_of", lambda spec, nodes: spec)
        monkeypatch.setattr(maker, "resolve_site", lambda nodes, spec, *_: site_from_spec(spec))
        job = of_the_job(words[1:], off)
        sizes = job.sizes
        assert (
            sizes is not None
            and site_from_spec(load_spec("c.toml")).world_size == job.world_size == 8
        )
        given = f"pipeline={sizes.pipeline},tensor={sizes.tensor}"
        status = main(["plan", "--cluster", "c.toml", "--sizes", given, "--json", "--", *words])
        assert status in (0, 1), "1: a group spans"
        planned = parse_plan(capsys.readouterr().out, "what is printed")
        assert planned.nodes == job.nodes and planned.sizes == job.sizes
        for ours, theirs in zip(planned.traffic, job.traffic, strict=True):
            assert (
                ours.transports == theirs.transports and ours.stage_links == theirs.stage_links
            ), site
            assert ours.reductions == theirs.reductions and ours.tied == theirs.tied, site
            assert ours.in_flight == theirs.in_flight, site
