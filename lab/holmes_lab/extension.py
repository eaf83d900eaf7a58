"""Registration of this package, holmes_lab, as an extension of the package holmes_ext.

holmes_ext trains over clusters with different NICs, and provides the command `holmes`. holmes_lab
emulates such clusters on one machine, and adds `holmes lab` and `holmes demo` to the command, and
the environment variables below to its help.
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
