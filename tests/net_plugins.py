"""Network plugins of NCCL for tests: libraries whose table has a name, compiled from a few lines of C."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

#: A plugin has one table for each version of NCCL's interface. Its first field is the network's name. This
#: one writes a file when a process loads it.
_SOURCE = """
#include <stdio.h>
struct table { const char* name; void* functions[19]; };
%(tables)s
__attribute__((constructor)) static void loaded(void) { fclose(fopen("%(path)s.loaded", "w")); }
"""


def build_plugin(path: Path, *names: str, needs: Path | None = None) -> Path:
    """Compile a network plugin, and return its path.

    Args:
        path: File of the plugin.
        names: Names of its network, in the tables of the versions 10, 9, 8, ...
        needs: A library that the plugin needs.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    tables = [
        f'struct table ncclNetPlugin_v{10 - number} = {{"{name}"}};'
        for number, name in enumerate(names)
    ]
    source = path.with_suffix(".c")
    source.write_text(_SOURCE % {"tables": "\n".join(tables), "path": path})
    libraries = [str(needs)] if needs else []
    command = [compiler, "-shared", "-fPIC", "-o", str(path), str(source)]
    link_options = ["-Wl,--no-as-needed", f"-Wl,-soname,{path.name}"]
    subprocess.run([*command, *link_options, *libraries], check=True)
    return path
