"""Writes what the device side takes from the host tables that NCCL's own generators make: python generate.py
SRC OUT.

    SRC/device/generate.py -> OUT/host_table.cc      functions and their numbers, kernels
    SRC/device/symmetric/generate.py -> OUT/symmetric/*.cc
    OUT/functions.cc, OUT/kernels.inc                the function of each number; the names of all kernels
"""

import re
import subprocess
import sys
from pathlib import Path

OPS = {
    "Sum": "kSum",
    "Prod": "kProd",
    "MinMax": "kMinMax",
    "PreMulSum": "kPreMulSum",
    "SumPostDiv": "kSumPostDiv",
}
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
    """The initializer of a row such as ["AllReduce", "Sum", "f32", "RING", "LL"], ["AllGather", "RING",
    "LL"]."""
    collective, *rest = words
    op, kind = (OPS[rest[0]], TYPES[rest[1]]) if len(rest) == 4 else ("kNone", "kU8")
    algorithm, protocol = rest[-2:] if rest else ("RING", "SIMPLE")
    return f"{{ncclFunc{collective}, Op::{op}, Type::{kind}, NCCL_ALGO_{algorithm}, NCCL_PROTO_{protocol}}}"


def functions(table: str) -> list[str]:
    """By number. A number that serves several rows (signed and unsigned sums) is given by the first."""
    rows = table[table.index("ncclDevFuncRowToId[]") :].split("};")[0]
    found: dict[int, str] = {}
    for number, words in re.findall(r"\*/ (\d+), // (.+)", rows):
        found.setdefault(int(number), function(words.split()))
    return [found.get(number, function(["SendRecv"])) for number in range(max(found) + 1)]


def main(source: Path, out: Path) -> None:
    (out / "symmetric").mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "generate.py", str(out / "device")],
        cwd=source / "device",
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (out / "device" / "host_table.cc").rename(out / "host_table.cc")
    subprocess.run(
        [sys.executable, "generate.py", str(out / "symmetric")],
        cwd=source / "device/symmetric",
        check=True,
        stdout=subprocess.DEVNULL,
    )
    hosts = [out / "host_table.cc", *(out / "symmetric").glob("*.cc")]
    table = hosts[0].read_text()
    kernels = [
        (name, arguments)
        for host in hosts
        for name, arguments in re.findall(r"__global__ void (\w+)\((\w+) const\)", host.read_text())
    ]
    (out / "functions.cc").write_text(
        '#include "functions.h"\n\nnamespace device_side {\n\nconst Function kFunctions[] = {\n'
        + "".join(f"    {row},\n" for row in functions(table))
        + "};\n\n}  // namespace device_side\n"
    )
    (out / "kernels.inc").write_text(
        "".join(f"KERNEL({name}, {arguments})\n" for name, arguments in kernels)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
