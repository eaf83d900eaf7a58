"""Checkpoint engine "holmes" of verl: rollout workers at other sites get weights through `holmes weights`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=holmes
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_engine
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.holmes.directory=DIR

and `holmes weights receive DIR --join SITE@HOST:PORT` on each host of rollout workers, with the same DIR.
Rank 0 of the actor must be on the host of `holmes join serve`. Each step is a full version; its number is
verl's global step.
"""

import asyncio
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from weight_files import load

from holmes_ext.weights import publish, wait_for_version


@CheckpointEngineRegistry.register("holmes")
class HolmesCheckpointEngine(CheckpointEngine):
    """Checkpoint engine that publishes the weights of an actor, or loads them at a rollout worker.

    verl makes one in each process. `directory` is only used at rollout workers, `port` only at the actor.
    """

    def __init__(self, bucket_size, directory, is_master=False, port=29600):
        self._bucket_size = bucket_size  # bytes of a file
        self._directory = directory  # DIR of `holmes weights receive DIR`
        self._is_master = is_master  # rank 0 of the actor
        self._port = port  # of `holmes join serve`

    def prepare(self):
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        return {}, {}  # no process group between actor and rollout workers

    def init_process_group(self, **kwargs):
        pass

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        if not self._is_master:
            for _ in weights:  # gathering a tensor needs all ranks
                pass
            return
        with tempfile.TemporaryDirectory() as folder:
            self._save(weights, Path(folder))
            await asyncio.to_thread(publish, folder, global_steps, port=self._port)

    def _save(self, tensors, folder):
        """Write tensors into safetensors files of about `bucket_size` bytes.

        Args:
            tensors: Iterator over (name, tensor).
            folder: Folder of the files.
        """
        bucket = {}
        for number, (name, tensor) in enumerate(tensors):
            bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
            if sum(each.nbytes for each in bucket.values()) >= self._bucket_size:
                save_file(bucket, folder / f"model-{number:06d}.safetensors")
                bucket = {}
        save_file(bucket, folder / "model.safetensors")

    async def receive_weights(self, global_steps=None):
        folders = await asyncio.to_thread(wait_for_version, self._directory, global_steps)
        for name, tensor in load(folders).items():
            yield name, tensor
