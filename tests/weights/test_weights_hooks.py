"""Hooks of examples/weights for verl and vLLM, run by the real code where it is present.

A test named _double runs against a double of the interface, always. The others need checkouts (rl_stacks.py).
"""

import asyncio
import types
from abc import ABC, abstractmethod

import torch
from rl_stacks import VERL, VLLM, imported
from safetensors.torch import save_file
from weights_sites import EXAMPLE, assert_same, random_tensors

from holmes_ext import weights

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
