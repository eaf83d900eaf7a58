"""Generates the sources of NCCL's emulated device code: python generate.py SRC OUT.

NCCL's own generators write the host tables that number its device functions and kernels. This script runs
them, and derives the tables of the emulated device code from their output:

    SRC/device/generate.py            writes   OUT/host_table.cc     numbers of device functions, kernels
    SRC/device/symmetric/generate.py  writes   OUT/symmetric/*.cc    kernels for symmetric memory (memory of
                                                                     several GPUs at the same
                                                                     addresses)
    this script                       writes   OUT/functions.cc      device function of each number
                                               OUT/kernels.inc       names of all kernels
"""

import re
import subprocess
import sys
from pathlib import Path

#: Reduction in NCCL's table -> enumerator of `Op` in functions.h.
OPS = {
    "Sum": "kSum",
    "Prod": "kProd",
    "MinMax": "kMinMax",
    "PreMulSum": "kPreMulSum",
    "SumPostDiv": "kSumPostDiv",
}
#: Data type in NCCL's table -> enumerator of `Type` in functions.h.
TYPES = {
    "i8": "kI8",
    "u8": "kU8",
    "i32": "kI32",
    "u32": "kU32",
    "i64": "kI64",
    "u64": "kU64",
    "f16": "kF16",
    "f32": "kF32",
    "f64": "kF64",
    "bf16": "kBF16",
    "f8e4m3": "kF8E4M3",
    "f8e5m2": "kF8E5M2",
}


def function(words: list[str]) -> str:
    """Return the C++ initializer of a device function.

    Args:
        words: Name of the function in NCCL's table: a collective, then a reduction and a data type if it
            reduces, then algorithm and protocol if there are several. Examples:
            ["AllReduce", "Sum", "f32", "RING", "LL"], ["AllGather", "RING", "LL"], ["SendRecv"].
    """
    match words:
        case [collective, reduction, data_type, algorithm, protocol]:
            op = OPS[reduction]
            element_type = TYPES[data_type]
        case [collective, *_, algorithm, protocol]:
            op = "kNone"
            element_type = "kU8"
        case [collective]:
            op = "kNone"
            element_type = "kU8"
            algorithm = "RING"
            protocol = "SIMPLE"
        case _:
            raise ValueError(f"unknown device function: {' '.join(words)}")
    return (
        f"{{ncclFunc{collective}, Op::{op}, Type::{element_type}, "
        f"NCCL_ALGO_{algorithm}, NCCL_PROTO_{protocol}}}"
    )


def functions(table: str) -> list[str]:
    """Return a C++ initializer for each device function: element n is that of function number n.

    Several rows of NCCL's table may have the same number, because signed and unsigned sums are the same
    function. The first of these rows is used. A number without a row is never launched by NCCL; the
    list has SendRecv there, so that later functions keep their positions.

    Args:
        table: Text of host_table.cc. Its array ncclDevFuncRowToId has rows such as
            "/*  22*/ 315, // AllReduce Sum i8 RING LL" (315 is the number), and "/*  25*/ -1,"
            without function.
    """
    rows = table[table.index("ncclDevFuncRowToId[]") :].split("};")[0]
    initializer_of: dict[int, str] = {}  # number of a function -> its initializer
    for number, name in re.findall(r"\*/ (\d+), // (.+)", rows):
        initializer_of.setdefault(int(number), function(name.split()))
    never_launched = function(["SendRecv"])
    return [initializer_of.get(number, never_launched) for number in range(max(initializer_of) + 1)]


def run_nccl_generator(folder: Path, out: Path) -> None:
    """Run the script generate.py in a folder of NCCL's source; it writes into the folder `out`."""
    subprocess.run(
        [sys.executable, "generate.py", str(out)],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def main(source: Path, out: Path) -> None:
    """Generate the tables of NCCL's emulated device code.

    NCCL's host code launches a kernel by its symbol, and passes the number of a device function to
    it. The file host_table.cc of NCCL's generator has all symbols and numbers, so the emulated
    device code gets its tables from that file.

    Args:
        source: The folder src of NCCL's source.
        out: Folder for the generated files. All *.cc files in it are compiled.
    """
    (out / "symmetric").mkdir(parents=True, exist_ok=True)
    run_nccl_generator(source / "device", out / "device")
    # The rest of device/ is CUDA code (.cu), and is not compiled.
    host_table = out / "host_table.cc"
    (out / "device" / "host_table.cc").rename(host_table)
    run_nccl_generator(source / "device/symmetric", out / "symmetric")

    lines = [f"    {initializer},\n" for initializer in functions(host_table.read_text())]
    (out / "functions.cc").write_text(
        '#include "functions.h"\n\nnamespace device_side {\n\nconst Function kFunctions[] = {\n'
        + "".join(lines)
        + "};\n\n}  // namespace device_side\n"
    )
    kernels: list[str] = []
    for file in (host_table, *(out / "symmetric").glob("*.cc")):
        declarations = re.findall(r"__global__ void (\w+)\((\w+) const\)", file.read_text())
        kernels.extend(f"KERNEL({name}, {arguments})\n" for name, arguments in declarations)
    (out / "kernels.inc").write_text("".join(kernels))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
