"""Hooks of examples/weights for slime, miles, verl and vLLM, run by the real code where it is present.

A test named _double runs against a double of the interface, always. The others need checkouts (rl_stacks.py).
"""

import asyncio
import json
import os
import types
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch
from rl_stacks import MILES, SLIME, VERL, VLLM, imported
from safetensors.torch import load_file, save_file
from weights_runs import Process, free_port, until

from holmes_ext import weights
from holmes_ext.errors import HolmesError
from holmes_ext.weights.publishing import publish_folder
from holmes_ext.weights.store import VersionStore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights"


class Sites:
    """A coordinator on this host, and a receiving host of two sites."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.port = free_port()
        self._folder = folder
        serve = self._started("join", "serve", "--host", "127.0.0.1", "--port", self.port)
        self._processes = [serve]
        until(lambda: any("jobs meet" in line for line in serve.lines), 60)
        self.directories = [folder / "east", folder / "west"]
        for directory in self.directories:
            address = f"{directory.name}@127.0.0.1:{self.port}"
            process = self._started("weights", "receive", directory, "--join", address)
            self._processes.append(process)

    def _started(self, *arguments):
        return Process(*arguments, home=self.home)

    def close(self):
        for process in self._processes:
            process.kill()


@pytest.fixture
def sites(tmp_path, monkeypatch):
    running = Sites(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(running.home))
    monkeypatch.setenv("WEIGHTS_PORT", str(running.port))
    monkeypatch.setenv("RANK", "0")
    yield running
    running.close()


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed.weight": (50, 16), "model.layers.0.weight": (16, 16), "norm": (16,)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --- verl ---------------------------------------------------------------------------------------------------


def verl_double():
    """Return a double of verl.checkpoint_engine.base: its registry and the abstract methods of an engine."""

    class CheckpointEngine(ABC):
        @abstractmethod
        def prepare(self): ...

        @classmethod
        @abstractmethod
        def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...

        @abstractmethod
        def init_process_group(self, **kwargs): ...

        @abstractmethod
        def finalize(self): ...

        @abstractmethod
        async def send_weights(self, weights, global_steps=None): ...

        @abstractmethod
        async def receive_weights(self, global_steps=None): ...

    class CheckpointEngineRegistry:
        engines = {}

        @staticmethod
        def register(backend):
            return lambda cls: CheckpointEngineRegistry.engines.setdefault(backend, cls)

        @classmethod
        def get(cls, backend):
            return cls.engines[backend]

        @classmethod
        def new(cls, backend, *args, **kwargs):
            return cls.engines[backend](*args, **kwargs)

    return {
        "CheckpointEngine": CheckpointEngine,
        "CheckpointEngineRegistry": CheckpointEngineRegistry,
    }


def run_verl(base, sites):
    """Send two steps' weights from ranks 0 and 1 of an actor to a worker at each site, as verl does.

    The calls are those of CheckpointEngineManager.update_weights, with the arguments of verl's two workers.
    """
    registry = base.CheckpointEngineRegistry
    actors = [
        registry.new("holmes", is_master=rank == 0, bucket_size=1000, directory="", port=sites.port)
        for rank in (0, 1)
    ]
    workers = [
        registry.new("holmes", bucket_size=1000, directory=str(directory))
        for directory in sites.directories
    ]
    engines = [*actors, *workers]
    metadata = [engine.prepare() for engine in engines]
    for kwargs in registry.get("holmes").build_topology(2, 2, metadata):
        assert all(len(values) == 2 for values in kwargs.values())

    async def update(tensors, step):
        sending = [actor.send_weights(iter(tensors.items()), global_steps=step) for actor in actors]
        receiving = [receive(worker, step) for worker in workers]
        results = await asyncio.gather(*sending, *receiving)
        return results[len(actors) :]

    async def receive(worker, step):
        return {name: tensor async for name, tensor in worker.receive_weights(global_steps=step)}

    for step in (1, 2):
        for engine in engines:
            engine.init_process_group()
        tensors = random_tensors(step)
        for found in asyncio.run(update(tensors, step)):
            assert_same(found, tensors)
        for engine in engines:
            engine.finalize()


def test_verl(sites):
    folder = VERL.folder_or_skip()
    stubs = dict.fromkeys(
        (
            "ray",
            "verl.single_controller",
            "verl.single_controller.base",
            "verl.single_controller.base.decorator",
            "verl.single_controller.ray",
            "verl.utils",
            "verl.utils.distributed",
            "verl.utils.import_utils",
            "verl.utils.ray_utils",
            "verl.workers",
            "verl.workers.config",
            "verl.workers.rollout",
            "verl.workers.rollout.utils",
        ),
        {},
    )
    packages = [
        ("verl", folder / "verl"),
        ("verl.checkpoint_engine", folder / "verl" / "checkpoint_engine"),
    ]
    with imported(packages, stubs, [EXAMPLE]) as load:
        load("verl_engine")
        run_verl(load("verl.checkpoint_engine.base"), sites)


def test_verl_double(sites):
    stubs = {"verl": {}, "verl.checkpoint_engine": {}, "verl.checkpoint_engine.base": verl_double()}
    with imported((), stubs, [EXAMPLE]) as load:
        load("verl_engine")
        run_verl(load("verl.checkpoint_engine.base"), sites)


# --- vLLM ---------------------------------------------------------------------------------------------------


class ModelDouble:
    """Model of vLLM, of which the engine uses load_weights() only."""

    def __init__(self):
        self.calls = []
        self.tensors = {}

    def load_weights(self, named_tensors):
        self.calls.append("load")
        self.tensors = dict(named_tensors)


def vllm_double():
    """Return doubles of vLLM's base class of engines and of its factory: module -> attributes."""

    class WeightTransferEngine(ABC):
        def __init__(self, config, vllm_config, device, model):
            self.model = model
            self.model_config = vllm_config.model_config

        def __class_getitem__(cls, types):
            return cls

        def parse_init_info(self, init_dict):
            return self.init_info_cls(**init_dict)

        def update_weights(self, update_info):
            self.receive_weights(self.update_info_cls(**update_info))

        @abstractmethod
        def init_transfer_engine(self, init_info): ...

        @abstractmethod
        def start_weight_update(self): ...

        @abstractmethod
        def finish_weight_update(self): ...

        @abstractmethod
        def receive_weights(self, update_info): ...

        @abstractmethod
        def shutdown(self): ...

    class WeightTransferEngineFactory:
        engines = {}

        @classmethod
        def register_engine(cls, name, engine_class):
            cls.engines[name] = engine_class

        @classmethod
        def create_engine(cls, config, vllm_config, device, model):
            return cls.engines[config.backend](config, vllm_config, device, model)

    return {
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": WeightTransferEngineFactory
        },
    }


#: vLLM's functions that reload a model layer by layer: recorded only.
RELOAD = {
    "vllm.model_executor": {},
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": lambda model: model.calls.append("initialize"),
        "finalize_layerwise_reload": lambda model, config: model.calls.append("finalize"),
    },
}


def run_vllm(factory, sites, folder, monkeypatch):
    """Update the model of a worker at each site as vLLM's GPU worker does, to a full version and a delta."""
    # torch has no accelerator to synchronize with here; vLLM does so after each update.
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    from weight_files import save_delta

    config = types.SimpleNamespace(backend="holmes")
    vllm_config = types.SimpleNamespace(parallel_config=None, model_config="model config")
    device = torch.device("cpu")
    models = [ModelDouble() for _ in sites.directories]
    engines = [factory.create_engine(config, vllm_config, device, model) for model in models]
    for engine, directory in zip(engines, sites.directories):
        engine.init_transfer_engine(engine.parse_init_info({"directory": str(directory)}))
    for version in (1, 2):
        tensors = random_tensors(version)
        made = folder / f"made{version}"
        made.mkdir()
        if version == 1:
            save_file(tensors, made / "model.safetensors")
        else:
            save_delta(made, tensors, random_tensors(version - 1))
        weights.publish(made, version, parent=version - 1 or None, port=sites.port)
        for engine, model in zip(engines, models):
            model.calls.clear()
            engine.start_weight_update()
            engine.update_weights({"version": version})
            engine.finish_weight_update()
            assert model.calls == ["initialize", "load", "finalize"]
            assert_same(model.tensors, tensors)
    for engine in engines:
        engine.shutdown()


def test_vllm(sites, tmp_path, monkeypatch):
    folder = VLLM.folder_or_skip() / "vllm"
    packages = [
        ("vllm", folder),
        ("vllm.distributed", folder / "distributed"),
        ("vllm.distributed.weight_transfer", folder / "distributed" / "weight_transfer"),
    ]
    stubs = {**RELOAD, **dict.fromkeys(("vllm.config", "vllm.config.parallel"), {})}
    stubs |= dict.fromkeys(("vllm.config.weight_transfer", "vllm.logger"), {})
    with imported(packages, stubs, [EXAMPLE]) as load:
        factory = load("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        load("vllm_engine")
        run_vllm(factory, sites, tmp_path, monkeypatch)


def test_vllm_double(sites, tmp_path, monkeypatch):
    packages = dict.fromkeys(("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"), {})
    with imported((), {**packages, **RELOAD, **vllm_double()}, [EXAMPLE]) as load:
        factory = load("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        load("vllm_engine")
        run_vllm(factory, sites, tmp_path, monkeypatch)


# --- slime and miles ----------------------------------------------------------------------------------------


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


def test_a_version_that_does_not_arrive(tmp_path):
    with pytest.raises(HolmesError, match="version 3 has not arrived within 0.1 s; is `holmes"):
        weights.wait_for_version(tmp_path, 3, timeout_s=0.1)


def test_a_version_that_is_removed_while_it_is_looked_up(tmp_path, monkeypatch):
    """A receiver commits version 2 and removes version 1 after `current` was read."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "a").write_text("a")
    store = VersionStore(tmp_path / "site")
    for version in (1, 2):
        publish_folder(made, store, version)
    store.commit(1)
    chain = VersionStore.chain

    def commit_first(self, version):
        monkeypatch.setattr(VersionStore, "chain", chain)
        store.commit(2)
        store.want(2)
        store.remove_old(keep=1)
        return chain(self, version)

    monkeypatch.setattr(VersionStore, "chain", commit_first)
    assert weights.current_folders(store.path) == [store.path / "2"]
    (store.path / ".holmes" / "manifests" / "2.json").unlink()  # by a user
    with pytest.raises(HolmesError, match="there is no version 2"):
        weights.current_folders(store.path)
