"""Registration of the lab as an extension of holmes_ext: its commands and environment variables.

The commands are `holmes lab` and `holmes demo`.
"""

from holmes_ext.extensions import Extension

EXTENSION = Extension(
    name="lab",
    commands={"lab": "holmes_lab.cli.lab", "demo": "holmes_lab.cli.demo"},
    variables={
        "HOLMES_NCCL_SOURCE": "a checkout of NCCL, or its archive, for `holmes lab run --gpu` "
        "(default: ~/.cache/holmes_ext/nccl)",
        "HOLMES_GPU_CACHE": "where the libraries of the emulated GPU are kept (default: "
        "~/.cache/holmes_ext/gpu)",
        "HOLMES_GPU_COMPILE": "off: torch.compile does nothing on emulated GPUs; else it traces and "
        "generates no code",
        "HOLMES_GPU_UNTRIED": "1: emulated GPUs for a torch with which they were not tried",
    },
)
