"""Weight transfer engine "holmes" of vLLM: loads versions that `holmes weights receive` has received.

    vllm serve MODEL --weight-transfer-config '{"backend": "holmes"}'
               --worker-extension-cls vllm_engine.Registered

and `holmes weights receive DIR --join SITE@HOST:PORT` on each host, with the same DIR. Then, with vLLM's
client or its HTTP routes of the same names:

    init_weight_transfer_engine({"directory": DIR})      once
    wait_for_version(DIR, N)                             of holmes_ext.weights; vLLM generates meanwhile
    start_weight_update(), update_weights({"version": N}), finish_weight_update()

Each worker reads all tensors of the version, from files as weight_files.py writes them.
"""

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from weight_files import load

from holmes_ext.weights import wait_for_version


@dataclass
class InitInfo(WeightTransferInitInfo):
    directory: str  # DIR of `holmes weights receive DIR`


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int


class HolmesEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weight transfer engine that loads versions from the folder of `holmes weights receive`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info):
        self._directory = init_info.directory

    def start_weight_update(self):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        folders = wait_for_version(self._directory, update_info.version)
        self.model.load_weights(load(folders).items())

    def finish_weight_update(self):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        """Do nothing: the engine has no connection."""


class Registered:
    """Empty extension of a worker: naming it imports this module, which registers the engine."""


WeightTransferEngineFactory.register_engine("holmes", HolmesEngine)
