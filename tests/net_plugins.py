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


def build_plugin(path: Path, *names: str, needs: Path | None = None, option: str = "") -> Path:
    """Compile a network plugin, and return its path.

    Args:
        path: File of the plugin.
        names: Names of its network, in the tables of the versions 10, 9, 8, ...
        needs: A library that the plugin needs.
        option: An option of the linker.
    """
    tables = [
        f'struct table ncclNetPlugin_v{10 - number} = {{"{name}"}};'
        for number, name in enumerate(names)
    ]
    text = _SOURCE % {"tables": "\n".join(tables), "path": path}
    libraries = ["-Wl,--no-as-needed", str(needs)] if needs else []
    return _compile(path, text, *libraries, *([option] if option else []))


#: A plugin that is another one under another name: it takes all functions of the other plugin's table.
_RENAMED = """
#include <dlfcn.h>
#include <string.h>
struct table { const char* name; void* functions[19]; };
struct table ncclNetPlugin_v10 = {"%(name)s"};
__attribute__((constructor)) static void take_functions(void) {
  void* library = dlopen("%(original)s", RTLD_NOW | RTLD_LOCAL);
  struct table* original = dlsym(library, "ncclNetPlugin_v10");
  memcpy(ncclNetPlugin_v10.functions, original->functions, sizeof original->functions);
}
"""


def rename_plugin(path: Path, original: Path, name: str) -> Path:
    """Compile a plugin that works as another one and gives the network another name; return its path.

    Args:
        path: File of the new plugin.
        original: File of the other plugin, with a table of version 10.
        name: NCCL's name of the network.
    """
    return _compile(path, _RENAMED % {"name": name, "original": original})


def _compile(path: Path, text: str, *options: str) -> Path:
    """Compile the text of a C program into a library, and return the library's path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    source = path.with_suffix(".c")
    source.write_text(text)
    command = [compiler, "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run([*command, f"-Wl,-soname,{path.name}", *options], check=True)
    return path
