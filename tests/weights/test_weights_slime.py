"""Hooks of examples/weights for slime and miles, run by the real code where it is present.

The test named _double runs against a double of the interface, always. The others need checkouts
(rl_stacks.py).
"""

import json
import os
import types
from pathlib import Path

import pytest
import torch
from rl_stacks import MILES, SLIME, imported
from safetensors.torch import load_file, save_file
from weights_sites import EXAMPLE, assert_same, random_tensors


def sglang_pull(folder):
    """Return sglang's function behind /pull_weights, from the patch that slime adds to sglang."""
    text = (folder / "docker/patch/latest/sglang-pull_weights.patch").read_text()
    added = text.partition("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")[2]
    lines = added.partition("\ndiff --git ")[0].splitlines()
    source = "\n".join(line[1:] for line in lines if line.startswith("+"))
    module = types.ModuleType("sglang_local_checkpoint")
    exec(compile(source, "local_checkpoint.py", "exec"), module.__dict__)
    return module.pull


class Remote:
    """Method of a Ray actor, called at once."""

    def __init__(self, function):
        self.remote = function


class Engine:
    """Handle of an sglang engine at a site: pulls into a local checkpoint, as a host of the engine does."""

    def __init__(self, pull, base, directory):
        self.local = directory.parent / f"local-{directory.name}"
        self.calls = []

        def pull_weights(target_version):
            pull(
                local_checkpoint_dir=str(self.local),
                base_dir=str(base),
                source_dir=str(directory),
                target_version=target_version,
                pre_read_hook="slime_hooks.wait_for",
            )
            self.calls.append(f"pull {target_version}")

        self.pull_weights = Remote(pull_weights)

    def __getattr__(self, name):
        return Remote(lambda **kwargs: self.calls.append(name))

    def tensors(self):
        """Return the local checkpoint, from which sglang reloads."""
        return load_file(self.local / "model.safetensors")


@pytest.fixture
def process_group(tmp_path):
    """Start a process group of one rank, as trainers have."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def disk_args(folder, base):
    """Return the arguments of the trainer that its disk transport reads."""
    return types.SimpleNamespace(
        update_weight_disk_dir=str(folder / "trainer"),
        update_weight_local_checkpoint_dir="local",
        update_weight_delta_encoding="xor",
        update_weight_delta_checksum="xxh3-128",
        custom_update_weight_post_write_path="slime_hooks.publish",
        hf_checkpoint=str(base),
        check_weight_update_equal=False,  # the flags from here on are those of miles
        pause_generation_mode="retract",
        q_lora_rank=None,
    )


def run_delta(updater, tensors, args, engines):
    """Let the trainer's class capture its base and publish two deltas; compare the engines' checkpoints."""
    updater.connect_rollout_engines(engines, None)
    updater.update_weights()
    for version in (1, 2):
        tensors.update(random_tensors(version))
        tensors["norm"] = random_tensors(0)["norm"]  # does not change, so no delta has it
        updater.update_weights()
        for engine in engines:
            assert engine.calls[-1] == "continue_generation"
            assert f"pull {version}" in engine.calls
            assert_same(engine.tensors(), tensors)
    assert len(list(Path(args.update_weight_disk_dir).glob("weight_v*"))) == 2


def base_checkpoint(folder):
    base = folder / "base"
    base.mkdir()
    save_file(random_tensors(0), base / "model.safetensors")
    return base


def test_slime_deltas(sites, tmp_path, process_group, monkeypatch):
    pytest.importorskip("zstandard")
    pytest.importorskip("xxhash")
    folder = SLIME.folder_or_skip()
    base = base_checkpoint(tmp_path)
    args = disk_args(tmp_path, base)
    tensors = random_tensors(0)

    class Distributed:
        """slime's base class, of which the delta class uses the tensors that all ranks gather."""

        def __init__(self, args, model, weights_getter, **kwargs):
            self.args = args
            self.weight_version = 0
            self.update_weight_metrics = {}

        def _iter_non_expert_chunks(self):
            yield list(tensors.items())

        def _iter_expert_chunks(self):
            yield []

    update = "slime.backends.megatron_utils.update_weight"
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts: None)
    stubs = {
        "ray": {"get": lambda values: values},
        "ray.actor": {},
        "megatron": {},
        "megatron.core": {"mpu": parallel_state_double()},
        "slime.utils.http_utils": {},
        "slime.utils.accelerator": {"current_device": lambda: "cpu"},
        "slime.utils.distributed_utils": {"get_gloo_group": lambda: None},
        f"{update}.update_weight_from_distributed": {"UpdateWeightFromDistributed": Distributed},
    }
    packages = [
        (name, folder.joinpath(*name.split(".")))
        for name in ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils")
    ]
    packages.append((update, folder.joinpath(*update.split("."))))
    with imported(packages, stubs, [EXAMPLE]) as load:
        module = load(f"{update}.update_weight_from_disk_delta")
        updater = module.UpdateWeightFromDiskDelta(
            args, [], dict, model_name="", quantization_config=None
        )
        pull = sglang_pull(folder)
        engines = [Engine(pull, base, directory) for directory in sites.directories]
        run_delta(updater, tensors, args, engines)


def test_slime_full_versions(sites, tmp_path, process_group):
    pytest.importorskip("zstandard")
    folder = SLIME.folder_or_skip()
    base = base_checkpoint(tmp_path)
    args = disk_args(tmp_path, base)
    tensors = random_tensors(0)

    def save(args, path, model, **kwargs):
        save_file(tensors, Path(path) / "model.safetensors")

    update = "slime.backends.megatron_utils.update_weight"
    stubs = {
        "ray.actor": {},
        "slime.utils.http_utils": {},
        "slime.utils.distributed_utils": {"get_gloo_group": lambda: None},
        "slime.backends.megatron_utils.hf_checkpoint_saver": {"save_hf_model_to_path": save},
    }
    names = ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils", update)
    packages = [(name, folder.joinpath(*name.split("."))) for name in names]
    with imported(packages, stubs, [EXAMPLE]) as load:
        module = load(f"{update}.update_weight_from_disk")
        updater = module.UpdateWeightFromDisk(
            args, [], dict, model_name="", quantization_config=None
        )
        pull = sglang_pull(folder)
        engines = [Engine(pull, base, directory) for directory in sites.directories]
        for version in (1, 2):
            tensors.update(random_tensors(version))
            updater.update_weights()
            for engine in engines:
                engine.pull_weights.remote(version)
                assert_same(engine.tensors(), tensors)


def parallel_state_double():
    """Return megatron.core.parallel_state for one rank."""
    return types.SimpleNamespace(
        get_data_parallel_rank=lambda with_context_parallel: 0,
        get_tensor_model_parallel_rank=lambda: 0,
    )


def test_miles_deltas(sites, tmp_path, process_group, monkeypatch):
    pytest.importorskip("zstandard")
    pytest.importorskip("xxhash")
    folder = MILES.folder_or_skip()
    pull = sglang_pull(SLIME.folder_or_skip())  # miles's own sglang is a branch elsewhere
    base = base_checkpoint(tmp_path)
    args = disk_args(tmp_path, base)
    tensors = random_tensors(0)

    class Mixin:
        """miles's base class, of which the delta class uses the tensors that all ranks gather."""

        def _init_lora(self, **kwargs):
            pass

        def _gather_and_update_non_expert_weights(self, bucket_func, pbar):
            bucket_func(list(tensors.items()), pbar)

        def _gather_and_update_expert_weights(self, bucket_func, pbar):
            pass

    update = "miles.backends.megatron_utils.update_weight"
    rank = types.SimpleNamespace(
        intra_dp_cp=types.SimpleNamespace(rank=0), tp=types.SimpleNamespace(rank=0)
    )
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    stubs = {
        "ray": {"get": lambda values: values},
        "ray.actor": {},
        "miles.backends.training_utils": {},
        "miles.backends.training_utils.parallel": {"get_parallel_state": lambda: rank},
        "miles.utils.http_utils": {},
        "miles.utils.distributed_utils": {"get_gloo_group": lambda: None},
        f"{update}.common": {"_check_weight_sync_results": lambda results, is_lora: None},
        f"{update}.update_weight_from_distributed.mixin": {"DistBucketedWeightUpdateMixin": Mixin},
    }
    names = ["miles", "miles.utils", "miles.backends", "miles.backends.megatron_utils"]
    names += [update, f"{update}.update_weight_from_distributed"]
    packages = [(name, folder.joinpath(*name.split("."))) for name in names]
    with imported(packages, stubs, [EXAMPLE]) as load:
        module = load(f"{update}.update_weight_from_distributed.delta")
        updater = module.UpdateWeightFromDiskDelta(
            args, [], dict, model_name="", quantization_config=None
        )
        engines = [Engine(pull, base, directory) for directory in sites.directories]
        run_delta(updater, tensors, args, engines)


def test_slime_double(sites, tmp_path, monkeypatch):
    """The hooks are called as slime and miles call them, on two ranks; see also the tests above."""
    trainer = tmp_path / "trainer"
    with imported((), {}, [EXAMPLE]) as load:
        hooks = load("slime_hooks")
        hooks.publish(None, str(trainer), [])  # once, for the empty folder of all versions
        for version in (1, 2):
            made = trainer / f"weight_v{version:06d}"
            made.mkdir(parents=True)
            (made / "model-00000-of-00001.safetensors").write_bytes(os.urandom(100))
            metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}"}
            index = {"metadata": metadata, "weight_map": {}}
            (made / "model.safetensors.index.json").write_text(json.dumps(index))
            for rank in ("1", "0"):
                monkeypatch.setenv("RANK", rank)
                hooks.publish(None, str(made), [])
        for directory in sites.directories:
            hooks.wait_for(str(directory), 0)
            hooks.wait_for(str(directory), 2)
            hooks.wait_for(str(directory), 2)
            for made in trainer.iterdir():
                for file in made.iterdir():
                    assert (directory / made.name / file.name).read_bytes() == file.read_bytes()
