"""Events of a CUDA device that are created, recorded and queried without Python's interpreter lock.

[Note: the driver and the interpreter lock]
A launch blocks while the device's queue of about a thousand operations is full, and other calls of the process to the driver then
block, too. torch holds the interpreter lock in `Event.record` and `Event.query`. So if a device waits in a collective for a rank
that is stopped, the first thread that records or queries an event would stop all threads of its process, also the watchdog's,
which report hangs. ctypes releases the lock: only the thread that calls blocks.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["DriverEvent", "make_event"]

DISABLE_TIMING = 2
NOT_READY = 600


def make_event(timing: bool = False) -> Any:
    """A new event, with the methods of `torch.cuda.Event`; torch's own if the driver cannot be loaded (a pretended GPU)."""
    return DriverEvent(timing) if _driver() is not None else torch.cuda.Event(enable_timing=timing)


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    for name, arguments in {
        "cuCtxGetCurrent": [out],
        "cuCtxSetCurrent": [handle],
        "cuEventCreate": [out, ctypes.c_uint],
        "cuEventRecord": [handle, handle],
        "cuStreamWaitEvent": [handle, handle, ctypes.c_uint],
        "cuEventQuery": [handle],
        "cuEventSynchronize": [handle],
        "cuEventElapsedTime": [ctypes.POINTER(ctypes.c_float), handle, handle],
        "cuEventDestroy_v2": [handle],
        "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    }.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'unknown error').decode()} (code {code})")


class DriverEvent:
    """An event of the current device's context; any thread may query it."""

    def __init__(self, timing: bool = False):
        self._handle, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        if not self._context:  # this thread has not used the device yet
            torch.cuda.set_device(torch.cuda.current_device())
            _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        _check(driver.cuEventCreate(ctypes.byref(self._handle), 0 if timing else DISABLE_TIMING))

    def record(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        _check(_driver().cuEventRecord(self._handle, stream.cuda_stream))

    def wait(self, stream: Any) -> None:
        """Make the later work of a stream wait for it."""
        _check(_driver().cuStreamWaitEvent(stream.cuda_stream, self._handle, 0))

    def query(self) -> bool:
        """Whether the device has reached it."""
        driver = _driver()
        _check(driver.cuCtxSetCurrent(self._context))  # a thread of the watchdog has no context yet
        code = driver.cuEventQuery(self._handle)
        if code != NOT_READY:
            _check(code)
        return bool(code == 0)

    def synchronize(self) -> None:
        _check(_driver().cuEventSynchronize(self._handle))

    def elapsed_time(self, other: DriverEvent) -> float:
        """Milliseconds from this event to another; both must have been reached."""
        found = ctypes.c_float()
        _check(_driver().cuEventElapsedTime(ctypes.byref(found), self._handle, other._handle))
        return found.value

    def __del__(self) -> None:
        if self._handle and (driver := _driver()) is not None:
            driver.cuEventDestroy_v2(self._handle)
