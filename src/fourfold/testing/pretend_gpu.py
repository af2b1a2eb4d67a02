"""A pretended GPU: the code of GPUs runs on a machine without one, and what a real one would refuse is refused.

    python -m fourfold.testing.pretend_gpu train run.toml --train.device cuda      # any command of fourfold
    python -m fourfold.testing.pretend_gpu script.py …                              # a script

Tensors of device "cuda" live in host memory and their operators are the CPU's (pretend_gpu.cpp), so results are bit-identical to
a run on the CPU. What differs from a CPU is what breaks code on GPUs:

- an operator on tensors of the device and of the host is an error (scalars of the host may be mixed in, as with CUDA);
- fresh memory is filled with NaN bytes;
- a copy to the host with `non_blocking=True` arrives when the host waits for it, not before: until then the target has NaNs;
- the device is as late as it can be: an event is reached when the host waits for it, for one that comes after it, or for a
  value; reading the time of an event that is not reached raises CUDA's own error;
- work in one stream that uses memory which another has written, still reads, or has just allocated is an error, unless it waits
  for the other, or the host has; so is freeing memory that another stream still uses, without `record_stream`;
- autograd runs the backward in a thread of its own.

Not covered: kernels (Triton, flash attention), collectives of NCCL (they are work of the stream that starts them), and memory of
the host that is freed or changed while a copy reads it.

torch must be loaded after the library of the device, so this is a program of its own, not a context. It needs g++.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["available", "build", "install"]

SOURCE = Path(__file__).with_suffix(".cpp")
TOTAL = 16 << 30
"""Bytes of memory that the device says it has."""
HOST = -1
"""Instead of a stream: what is issued later, in any of them."""


def available() -> bool:
    """Whether the device's library can be built here: it needs g++, and a torch without CUDA."""
    return shutil.which("g++") is not None and not (_torch_folder() / "lib" / "libtorch_cuda.so").exists()


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def build() -> Path:
    """The device's library for this torch; compiled at the first call, which takes ten seconds."""
    folder = _torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + (folder / "version.py").read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"fourfold-pretend-{os.getuid()}-{key}.so"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", f"-I{folder / 'include'}", str(SOURCE)]
        subprocess.run([*command, "-o", str(partial), *libraries], check=True)
        partial.rename(made)
    return made


def install() -> None:
    """Load the device's library, then torch, and give `torch.cuda` what it lacks; once per process."""
    assert "torch" not in sys.modules, "the pretended GPU must be there before torch"
    libraries = _torch_folder() / "lib"
    ctypes.CDLL(str(libraries / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(libraries / "libtorch_cpu.so"))
    library = ctypes.CDLL(str(build()))
    for name in ("pretend_issued", "pretend_bytes", "pretend_moment"):
        getattr(library, name).restype = ctypes.c_int64
    library.pretend_problem.restype = ctypes.c_char_p
    library.pretend_order.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.pretend_record.argtypes = [ctypes.c_void_p, ctypes.c_int]
    atexit.register(_report_free, library)
    _Cuda(library).install()


def _report_free(library: Any) -> None:
    """At exit: end with code 1 if memory was freed too early, and no operator has reported it."""
    if found := library.pretend_problem():
        print(found.decode(), file=sys.stderr, flush=True)
        os._exit(1)


class _Cuda:
    """What `torch.cuda` offers, of a device that is as late as it can be."""

    def __init__(self, library: Any):
        self.library = library
        self.reached: dict[int, int] = {}  # by stream, the last event that is known to be reached
        self.default = self.make_stream(0)
        self.lock = threading.Lock()  # for `reached`
        self.entered = threading.local()  # the streams that a thread has entered, innermost last

    @property
    def streams(self) -> list[Any]:
        """Of this thread; every thread begins with the default stream."""
        if not hasattr(self.entered, "streams"):
            self.entered.streams = [self.default]
        found: list[Any] = self.entered.streams
        return found

    def make_stream(self, number: int) -> Any:
        outer = self

        class Stream:
            """A queue of work; work is done when it is submitted, and events say when that may be known."""

            cuda_stream = number
            device_index = 0

            def __init__(self) -> None:
                self.behind: dict[int, int] = {}  # events of other streams that this one has waited for

            def record_event(self, event: Any = None) -> Any:
                event = event or outer.event()()
                event.record(self)
                return event

            def wait_event(self, event: Any) -> None:
                for stream, at in event.behind.items():
                    self.behind[stream] = max(at, self.behind.get(stream, 0))
                    outer.library.pretend_order(number, stream, at)

            def wait_stream(self, other: Any) -> None:
                self.wait_event(other.record_event())

            def synchronize(self) -> None:
                self.record_event().synchronize()

            def query(self) -> bool:
                return self.record_event().query()

        return Stream()

    def event(self) -> Any:
        return self.Event

    def install(self) -> None:
        import torch

        outer, library, device = self, self.library, torch.device("cuda", 0)

        class Event:
            """A moment of a stream."""

            def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
                self.timed, self.number, self.stream, self.copies = enable_timing, 0, 0, 0
                self.behind: dict[int, int] = {}

            def record(self, stream: Any = None) -> None:
                stream = stream or outer.streams[-1]
                self.number, self.stream, self.at = library.pretend_moment(), stream.cuda_stream, time.perf_counter()
                self.behind = stream.behind | {self.stream: self.number}
                self.copies = library.pretend_issued()

            def query(self) -> bool:
                return outer.reached.get(self.stream, 0) >= self.number

            def synchronize(self) -> None:
                with outer.lock:
                    for stream, number in self.behind.items():
                        outer.reached[stream] = max(number, outer.reached.get(stream, 0))
                        library.pretend_order(HOST, stream, number)
                library.pretend_flush(ctypes.c_int64(self.copies))

            def wait(self, stream: Any = None) -> None:
                (stream or outer.streams[-1]).wait_event(self)

            def elapsed_time(self, other: Any) -> float:
                if not self.timed or not other.timed:
                    raise ValueError("Both events must be created with argument 'enable_timing=True'.")
                if not self.number or not other.number:
                    raise ValueError("Both events must be recorded before calculating elapsed time.")
                if not self.query() or not other.query():
                    raise ValueError("Both events must be completed before calculating elapsed time.")
                return 1000 * (other.at - self.at)

        class Within:
            """The context of `torch.cuda.stream`."""

            def __init__(self, stream: Any):
                self.stream = stream

            def __enter__(self) -> None:
                if self.stream is not None:
                    outer.streams.append(self.stream)
                    library.pretend_stream(self.stream.cuda_stream)

            def __exit__(self, *_: object) -> None:
                if self.stream is not None:
                    outer.streams.pop()
                    library.pretend_stream(outer.streams[-1].cuda_stream)

        class Nothing:
            """The context of `torch.cuda.device`."""

            def __init__(self, *_: object):
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

        class Properties:
            name, total_memory, major, minor, multi_processor_count = "Pretended H200", TOTAL, 9, 0, 132
            L2_cache_size = 60 << 20

        class Runtime:
            """Of the CUDA runtime, what registers host memory."""

            @staticmethod
            def cudaHostRegister(address: int, size: int, flags: int) -> int:
                return 0

            @staticmethod
            def cudaHostUnregister(address: int) -> int:
                return 0

        def synchronize(_: object = None) -> None:
            with outer.lock:
                now = library.pretend_moment()
                outer.reached.update(dict.fromkeys(outer.all_streams, now))
                for each in outer.all_streams:
                    library.pretend_order(HOST, each, now)
            library.pretend_flush(ctypes.c_int64(library.pretend_issued()))

        def stream(_: object = None, priority: int = 0) -> Any:
            made = outer.make_stream(len(outer.all_streams))
            outer.all_streams.append(made.cuda_stream)
            return made

        self.Event, self.all_streams = Event, [0]
        cuda: Any = torch.cuda
        cuda._lazy_init = lambda: None
        cuda.Event, cuda.Stream, cuda.stream, cuda.device = Event, stream, Within, Nothing
        cuda.current_stream = lambda _=None: outer.streams[-1]
        cuda.is_available = cuda.is_initialized = lambda: True
        cuda.device_count, cuda.current_device = (lambda: 1), (lambda: 0)
        cuda.set_device = cuda.empty_cache = lambda *_: None
        cuda.synchronize, cuda.cudart = synchronize, Runtime
        cuda.get_device_name, cuda.get_device_properties = lambda _=None: Properties.name, lambda _=None: Properties
        cuda.get_device_capability = lambda _=None: (9, 0)
        cuda.memory_allocated = lambda _=None: library.pretend_bytes(0)
        cuda.max_memory_allocated = lambda _=None: library.pretend_bytes(1)
        cuda.reset_peak_memory_stats = lambda _=None: library.pretend_reset_peak()
        cuda.mem_get_info = lambda _=None: (TOTAL - library.pretend_bytes(0), TOTAL)
        cuda.memory_stats_as_nested_dict = lambda _=None: {
            "allocated_bytes": {"all": {"current": library.pretend_bytes(0)}}
        }
        cuda.manual_seed = cuda.manual_seed_all = lambda _: None
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            if storage.device.type != "cuda":
                return resize(storage, size)
            library.pretend_resize(ctypes.c_void_p(storage._cdata), ctypes.c_int64(size))
            return storage

        storages: Any = torch.UntypedStorage
        tensors: Any = torch.Tensor
        storages.resize_ = resize_
        tensors.record_stream = lambda tensor, stream: library.pretend_record(
            tensor.untyped_storage()._cdata, stream.cuda_stream
        )
        exists = Path.exists
        Path.exists = lambda path, **how: str(path) == "/dev/nvidiactl" or exists(path, **how)  # type: ignore[method-assign]
        assert torch.zeros(1, device=device).is_cuda
        _pretend_nccl()


def _pretend_nccl() -> None:
    """A process group of "cpu:gloo,cuda:nccl" is one of gloo that says what it was asked for."""
    import torch.distributed as dist

    backends: Any = dist.ProcessGroupGloo
    plain, start, made = dist.get_backend_config, dist.init_process_group, []
    asked = {"nccl": False}

    def init(backend: str | None = None, **how: Any) -> None:
        asked["nccl"] = backend is not None and "nccl" in backend
        start("gloo" if asked["nccl"] else backend, **how)

    def config(group: Any = None) -> str:
        return "cpu:gloo,cuda:nccl" if asked["nccl"] else plain(group)

    dist.init_process_group, dist.get_backend_config = init, config  # type: ignore[assignment]
    dist.is_nccl_available = lambda: True
    backends.eager_connect_single_device = lambda backend, _: made.append(backend)
    backends._comm_ptr = lambda backend: int(asked["nccl"] and any(each is backend for each in made))


def main() -> None:
    install()
    if sys.argv[1].endswith(".py"):
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    from fourfold.cli import main as command

    sys.argv[0] = "fourfold"
    command()


if __name__ == "__main__":
    main()
