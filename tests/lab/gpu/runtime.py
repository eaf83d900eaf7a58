"""The emulated GPU's runtime by ctypes, in a process of its own for each case.

The command is `python runtime.py LIBRARY SCENE`.

A case puts work into streams and prints what happened, as JSON. Kernels are Python functions that note their
names.
"""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

NON_BLOCKING = 1


class Kernel(ctypes.Structure):  # egpuKernel
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
        ("flops", ctypes.c_double),
        ("bytes", ctypes.c_double),
        ("sms", ctypes.c_int),
    ]


FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Gpu:
    """One emulated GPU. order: names of kernels as they ended."""

    def __init__(self, library: str):
        self.cuda = ctypes.CDLL(library)
        self.order: list[str] = []
        self._kept: list = []

    def call(self, name: str, *arguments) -> int:
        return getattr(self.cuda, name)(*arguments)

    def stream(self, flags: int = NON_BLOCKING) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        assert self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), flags) == 0
        return stream

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        assert self.call("cudaEventCreateWithFlags", ctypes.byref(event), 0) == 0
        return event

    def launch(
        self,
        stream,
        name: str,
        gate: threading.Event | None = None,
        sms: int = 0,
        flops: float = 0.0,
    ) -> int:
        """Launch a kernel that waits for its gate, if it has one, and then notes its name."""

        def run(_) -> None:
            if gate is not None:
                gate.wait()
            self.order.append(name)

        run, release = FUNCTION(run), FUNCTION(lambda _: None)
        self._kept += [run, release]
        kernel = Kernel(
            name.encode(),
            ctypes.cast(run, ctypes.c_void_p),
            ctypes.cast(release, ctypes.c_void_p),
            None,
            flops,
            0.0,
            sms,
        )
        return self.call("egpuLaunch", stream, ctypes.byref(kernel))

    def record(self, stream) -> ctypes.c_void_p:
        event = self.event()
        assert self.call("cudaEventRecord", event, stream) == 0
        return event

    def wait(self, stream, event) -> None:
        assert self.call("cudaStreamWaitEvent", stream, event, 0) == 0

    def done(self, stream) -> bool:
        return self.call("cudaStreamQuery", stream) == 0

    def synchronize(self, stream=None) -> None:
        waited = (
            self.call("cudaDeviceSynchronize")
            if stream is None
            else self.call("cudaStreamSynchronize", stream)
        )
        assert waited == 0


def in_order(gpu: Gpu) -> object:
    stream = gpu.stream()
    for number in range(20):
        gpu.launch(stream, str(number))
    gpu.synchronize()
    return gpu.order


def side_by_side(gpu: Gpu) -> object:
    """Check that a kernel that waits holds up its own stream, not another one."""
    gate, one, two = threading.Event(), gpu.stream(), gpu.stream()
    gpu.launch(one, "held", gate)
    gpu.launch(one, "behind it")
    gpu.launch(two, "free")
    gpu.synchronize(two)
    before = list(gpu.order)
    gate.set()
    gpu.synchronize()
    return [before, gpu.order]


def event_wait(gpu: Gpu) -> object:
    gate, one, two = threading.Event(), gpu.stream(), gpu.stream()
    gpu.launch(one, "produces", gate)
    gpu.wait(two, gpu.record(one))
    gpu.launch(two, "consumes")
    early = gpu.done(two)
    gate.set()
    gpu.synchronize()
    return [early, gpu.order]


def event_of_now(gpu: Gpu) -> object:
    """Check that an event counts what was in the stream when it was recorded, not what comes later."""
    gate, one, two = threading.Event(), gpu.stream(), gpu.stream()
    gpu.launch(one, "first")
    event = gpu.record(one)
    gpu.launch(one, "later", gate)
    gpu.wait(two, event)
    gpu.launch(two, "waits for the first")
    gpu.synchronize(two)
    before = list(gpu.order)
    gate.set()
    gpu.synchronize()
    return before


def legacy_stream(gpu: Gpu) -> object:
    """Check that the default stream and blocking streams wait for each other; other streams do not wait."""
    gate, blocking, other = threading.Event(), gpu.stream(0), gpu.stream()
    gpu.launch(blocking, "blocking", gate)
    gpu.launch(None, "default")
    gpu.launch(blocking, "blocking again")
    gpu.launch(other, "other")
    gpu.synchronize(other)
    before = list(gpu.order)
    gate.set()
    gpu.synchronize()
    return [before, gpu.order]


def hardware_queue(gpu: Gpu) -> object:
    """With one hardware queue a stream waits behind another one's head that cannot start."""
    gate, one, two = threading.Event(), gpu.stream(), gpu.stream()
    gpu.launch(one, "runs", gate)
    gpu.launch(one, "cannot start")
    gpu.launch(two, "falsely behind")
    early = gpu.done(two)
    gate.set()
    gpu.synchronize()
    return [early, gpu.order]


def events_in_a_hardware_queue(gpu: Gpu) -> object:
    """With one hardware queue a record behind a running kernel and a wait for it hold up no third stream."""
    gate, one, two, three = threading.Event(), gpu.stream(), gpu.stream(), gpu.stream()
    gpu.launch(one, "runs", gate)
    gpu.wait(three, gpu.record(one))
    gpu.launch(two, "beside it")
    until = time.monotonic() + 10
    while not gpu.done(two) and time.monotonic() < until:
        time.sleep(0.01)
    gate.set()
    gpu.synchronize()
    return gpu.order


def hardware_queues(gpu: Gpu) -> object:
    """With several, a stream ends while another one's head cannot start."""
    gate, one, two = threading.Event(), gpu.stream(), gpu.stream()
    gpu.launch(one, "runs", gate)
    gpu.launch(one, "cannot start")
    gpu.launch(two, "on its own")
    gpu.synchronize(two)
    gate.set()
    gpu.synchronize()
    return gpu.order


def multiprocessors(gpu: Gpu) -> object:
    """Kernels that hold multiprocessors (those of NCCL) wait until enough are free; so do computing ones."""
    gate = threading.Event()
    streams = [gpu.stream() for _ in range(4)]
    gpu.launch(streams[0], "holds 3", gate, sms=3)
    gpu.launch(streams[1], "needs 2", sms=2)
    gpu.launch(streams[2], "needs 1", sms=1)
    gpu.launch(streams[3], "computes")
    gpu.synchronize(streams[2])
    gpu.synchronize(streams[3])
    before = [sorted(gpu.order), gpu.done(streams[1])]
    gate.set()
    gpu.synchronize()
    return [before, gpu.order[-1]]


def full(gpu: Gpu) -> object:
    """All multiprocessors held: not even a computing kernel starts."""
    gate, one, two = threading.Event(), gpu.stream(), gpu.stream()
    gpu.launch(one, "holds 4", gate, sms=4)
    gpu.launch(two, "computes")
    early = gpu.done(two)
    gate.set()
    gpu.synchronize()
    return [early, gpu.order]


def pageable(gpu: Gpu) -> object:
    """Check when copies from and to pageable memory return.

    A copy from pageable memory has taken its source when the call returns; one to pageable memory
    waits.
    """
    gate, stream, address = threading.Event(), gpu.stream(), ctypes.c_void_p()
    gpu.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(4))
    source, target = ctypes.create_string_buffer(b"abc"), ctypes.create_string_buffer(4)
    gpu.launch(stream, "before", gate)
    gpu.call("cudaMemcpyAsync", address, source, ctypes.c_size_t(4), 1, stream)
    source.value = b"xyz"
    gate.set()
    gpu.call("cudaMemcpyAsync", target, address, ctypes.c_size_t(4), 2, stream)
    return target.value.decode()


def failure(gpu: Gpu) -> object:
    """Check that a kernel that is not emulated is an error by its name, and nothing else happens."""
    symbol, stub = ctypes.c_int(), ctypes.c_char_p(b"_Z8my_adderPfS_")
    gpu.call(
        "__cudaRegisterFunction",
        None,
        ctypes.byref(symbol),
        None,
        stub,
        0,
        None,
        None,
        None,
        None,
        None,
    )
    sizes = [ctypes.c_uint64(1)] * 4
    error = gpu.call(
        "__cudaLaunchKernel", ctypes.byref(symbol), *sizes, None, ctypes.c_size_t(0), None
    )
    gpu.cuda.cudaGetErrorString.restype = ctypes.c_char_p
    text = gpu.cuda.cudaGetErrorString(error).decode()
    return [error, text, gpu.call("cudaGetLastError"), gpu.call("cudaGetLastError")]


def clock(gpu: Gpu) -> object:
    """With an emulated clock kernels take FLOPs / rate of it, one after the other, while the host goes on."""
    one, two = gpu.stream(), gpu.stream()
    start, ends = gpu.record(one), []
    for stream in (one, two, one):
        gpu.launch(stream, "computes", flops=50e6)
        ends.append(gpu.record(stream))
    early = gpu.done(one)
    gpu.synchronize()
    times, milliseconds = [], ctypes.c_float()
    for end in ends:
        assert gpu.call("cudaEventElapsedTime", ctypes.byref(milliseconds), start, end) == 0
        times.append(round(milliseconds.value))
    return [early, times]


def patience(gpu: Gpu) -> object:
    """Questions until this thread has waited 0.1 s, and what the next one is once it was given something."""
    ask = gpu.cuda.egpuAskedInVain
    ask.restype = ctypes.c_long
    first, asked = ask(), 1
    while ask() < 100_000_000:
        asked += 1
    gpu.call("egpuGot")
    return [first, asked, ask()]


def ipc(gpu: Gpu) -> object:
    """Memory that another process opens is the same memory; here the same process opens it."""
    address, again = ctypes.c_void_p(), ctypes.c_void_p()
    gpu.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(1 << 20))
    inside = ctypes.c_void_p(address.value)
    handle = (ctypes.c_char * 64)()
    assert gpu.call("cudaIpcGetMemHandle", handle, inside) == 0

    class Handle(ctypes.Structure):
        _fields_ = [("reserved", ctypes.c_char * 64)]

    given = Handle.from_buffer_copy(handle)
    assert gpu.call("cudaIpcOpenMemHandle", ctypes.byref(again), given, 1) == 0
    ctypes.memmove(again, b"hello", 5)
    found = ctypes.string_at(address, 5).decode()
    return [found, again.value != address.value, gpu.call("cudaIpcCloseMemHandle", again)]


def memory(gpu: Gpu) -> object:
    """Check that freed memory is there again and joins its neighbours; a size above the rest is an error."""
    pieces = [ctypes.c_void_p() for _ in range(3)]
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for piece in pieces:
        assert gpu.call("cudaMalloc", ctypes.byref(piece), ctypes.c_size_t(1 << 20)) == 0
    gpu.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    used = total.value - free.value
    for piece in (pieces[0], pieces[2], pieces[1]):
        assert gpu.call("cudaFree", piece) == 0
    whole = ctypes.c_void_p()
    refused = gpu.call("cudaMalloc", ctypes.byref(whole), ctypes.c_size_t(total.value + 512))
    again = gpu.call("cudaMalloc", ctypes.byref(whole), ctypes.c_size_t(3 << 20))
    return [
        used,
        refused,
        again,
        whole.value == pieces[0].value,
        gpu.call("cudaFree", ctypes.c_void_p(12345)),
    ]


def races(gpu: Gpu) -> object:
    """Check races of two streams that fill the same memory.

    Between them is nothing, an event, or a wait of the host; then they fill other memory. The host
    also changes a pinned source before it is copied.
    """
    one, two, gate = gpu.stream(), gpu.stream(), threading.Event()
    address, pinned = ctypes.c_void_p(), ctypes.c_void_p()
    gpu.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(4096))
    gpu.call("cudaHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(64), 0)

    def fill(stream, begin: int, size: int) -> None:
        gpu.call(
            "cudaMemsetAsync",
            ctypes.c_void_p(address.value + begin),
            0,
            ctypes.c_size_t(size),
            stream,
        )

    fill(one, 0, 1024)
    gpu.wait(two, gpu.record(one))
    fill(two, 512, 1024)
    gpu.synchronize()
    fill(one, 0, 1024)
    fill(two, 1024, 1024)
    found = []
    for begin in (1023, 4095):  # of the other stream's, and of nobody's
        fill(two, begin, 1)
        found.append(told())
    for changes in (False, True):
        gpu.launch(one, "before", gate)
        gpu.call("cudaMemcpyAsync", address, pinned, ctypes.c_size_t(64), 1, one)
        if changes:
            ctypes.memset(pinned, 7, 64)
        gate.set()
        gpu.synchronize()
        found.append(told())
        gate.clear()
    return found


def graph_memory(gpu: Gpu) -> object:
    """Return the status and the value of each cudaGraphMemAttributeType, and the status of a reset."""
    answers = []
    for attribute in range(4):
        value = ctypes.c_uint64(77)
        status = gpu.call("cudaDeviceGetGraphMemAttribute", 0, attribute, ctypes.byref(value))
        answers.append([status, value.value])
    zero = ctypes.c_uint64(0)
    reset = gpu.call("cudaDeviceSetGraphMemAttribute", 0, 1, ctypes.byref(zero))
    return [answers, reset]


def device_code_and_graphs(gpu: Gpu) -> object:
    """Return the error of each function that torch 2.15 links, and that needs device code or CUDA graphs."""
    names = (
        "cudaLibraryLoadFromFile",
        "cudaLibraryGetGlobal",
        "cudaLibraryGetKernelCount",
        "cudaLibraryGetManaged",
        "cudaLibraryGetUnifiedFunction",
        "cudaUserObjectRelease",
    )
    gpu.cuda.cudaGetErrorString.restype = ctypes.c_char_p
    return {name: gpu.cuda.cudaGetErrorString(gpu.call(name)).decode() for name in names}


def pci_info(gpu: Gpu) -> object:
    """Return the bus ids that nvmlDeviceGetPciInfo_v3 writes, and the bytes after the 52nd of the struct.

    NCCL 2.30 passes a struct of 52 bytes. The bytes after it are filled with "x" before the call.
    """
    struct_bytes = 52
    bytes_after = 16
    nvml = ctypes.CDLL(str(Path(sys.argv[1]).with_name("libnvidia-ml.so.1")))
    handle = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    struct = ctypes.create_string_buffer(
        b"x" * (struct_bytes + bytes_after), struct_bytes + bytes_after
    )
    assert nvml.nvmlDeviceGetPciInfo_v3(handle, struct) == 0
    bus_id = ctypes.create_string_buffer(16)
    assert gpu.call("cudaDeviceGetPCIBusId", bus_id, 16, 0) == 0
    legacy_bus_id = struct.raw[:16].split(b"\0")[0]
    nvml_bus_id = struct.raw[36:struct_bytes].split(b"\0")[0]
    after_struct = struct.raw[struct_bytes:]
    return [text.decode() for text in (bus_id.value, legacy_bus_id, nvml_bus_id, after_struct)]


def told() -> int:
    """Missing waits so far."""
    file = Path(os.environ["HOLMES_GPU_WATCH"], "rank0.races")
    return len(file.read_text().splitlines()) if file.exists() else 0


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](Gpu(sys.argv[1]))))
