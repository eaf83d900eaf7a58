"""What torch's CUDA builds and older versions need to train on CPUs; nothing here knows of holmes.

Imported at start-up in the environments of benchmarks/matrix.py, whose torch is of any version.

    torch.accelerator   a CUDA build says "cuda" where there is no GPU, and fully_shard's own mesh would be there
    torch.cpu.Stream    has neither record_event nor wait_event before 2.7, which fully_shard calls
    torch's pipelining  before 2.8 forgets all works of a batch but the last, and gloo a send whose work is forgotten:
                        the receiver waits for ever
"""

from __future__ import annotations

import wrapt


class _Works(list):
    def wait(self):
        for work in self:
            work.wait()


def _accelerator(module):
    own = module.current_accelerator
    module.current_accelerator = lambda check_available=False: own() if module.is_available() else None


def _streams(module):
    if not hasattr(module.Stream, "record_event"):
        module.Stream.record_event = module.Stream.wait_event = lambda self, event=None: None


def _pipelining(module):
    if hasattr(module, "_wait_batch_p2p"):  # 2.8
        return

    def _batch_p2p(p2p_ops, desc=None):
        return _Works(module.dist.batch_isend_irecv(p2p_ops)) if p2p_ops else None

    module._batch_p2p = _batch_p2p


wrapt.register_post_import_hook(_accelerator, "torch.accelerator")
wrapt.register_post_import_hook(_streams, "torch.cpu")
wrapt.register_post_import_hook(_pipelining, "torch.distributed.pipelining.schedules")
