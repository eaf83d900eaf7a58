"""Lets the installed torch look like another release, as far as the names of NCCL's backend are concerned."""

from types import SimpleNamespace

from torch.distributed import distributed_c10d


def _create_nccl2_process_group(options, backend_options):
    """Stand in for the function of torch 2.14 and newer that makes a group with the backend nccl2."""


def _create_nccl_process_group(options, backend_options):
    """Stand in for torch's function that makes a group with the backend nccl-legacy."""


def _nccl2_device(options):
    """Stand in for the function of torch 2.15 that binds a group to a device."""


def look_like_torch(monkeypatch, release: str, nccl_is_nccl2: bool | None = None) -> None:
    """Let torch look like a release.

    Args:
        release: "2.13", "2.14" or "2.15".
        nccl_is_nccl2: Which implementation the backend "nccl" is; None for the default of the release. (The
            environment variable TORCH_DIST_USE_NCCL2 changes it.)
    """
    if nccl_is_nccl2 is None:
        nccl_is_nccl2 = release == "2.15"
    functions = {
        "_create_nccl2_process_group": _create_nccl2_process_group if release != "2.13" else None,
        "_nccl2_device": _nccl2_device if release == "2.15" else None,
    }
    for name, function in functions.items():
        if function is None:
            monkeypatch.delattr(distributed_c10d, name, raising=False)
        else:
            monkeypatch.setattr(distributed_c10d, name, function, raising=False)
    creator = _create_nccl2_process_group if nccl_is_nccl2 else _create_nccl_process_group
    backend = distributed_c10d.Backend
    monkeypatch.setattr(backend, "_ensure_backend_registered", lambda name: None, raising=False)
    monkeypatch.setitem(backend._plugins, "NCCL", SimpleNamespace(creator_fn=creator))
