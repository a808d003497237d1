"""Measures current and peak memory of this process: resident pages on the CPU, torch's caching allocator on CUDA.

All numbers are MiB (2**20 bytes). A process has only one high-water mark (the kernel's VmHWM, the allocator's peak
statistics), so resetting it loses it for all other readers. `PeakMonitor` shares it: before a reset, the mark is
folded into the maxima of every live monitor.
"""

import dataclasses
import functools
import mmap
import os
import re
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from optimum_memopt.sizes import MIB

_STATUS = Path("/proc/self/status")
_STATUS_LINES = re.compile(r"^(VmRSS|VmHWM):\s*(\d+)", re.MULTILINE)
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS_BYTES = 1 << 14
_PROBE_BYTES = 16 << 20
_SAMPLE_SECONDS = 0.005

MemoryT = TypeVar("MemoryT", bound="CpuMemory | CudaMemory")


@dataclass(frozen=True)
class CpuMemory:
    """Resident memory of this process in MiB; the peak is the highest `resident` of the phase."""

    resident: float
    peak_resident: float


@dataclass(frozen=True)
class CudaMemory:
    """torch's caching allocator on one device in MiB.

    `allocated` is held by tensors, `cached` (torch: reserved) was taken from the driver, `inactive` is the part of
    the cache in split blocks, which cannot be released. `max_*` is the highest of the phase.
    """

    allocated: float
    max_allocated: float
    cached: float
    max_cached: float
    inactive: float
    max_inactive: float


def held(reading: CpuMemory | CudaMemory) -> float:
    """Returns the memory held: resident or allocated, MiB."""
    return reading.resident if isinstance(reading, CpuMemory) else reading.allocated


def peak(reading: CpuMemory | CudaMemory) -> float:
    """Returns the peak that decides whether a step fits: peak resident or peak allocated, MiB."""
    return reading.peak_resident if isinstance(reading, CpuMemory) else reading.max_allocated


def merged(earlier: MemoryT | None, later: MemoryT) -> MemoryT:
    """Returns `later`, with each peak the maximum of both readings."""
    if earlier is None:
        return later
    peaks = [name for name in vars(later) if name.startswith(("peak_", "max_"))]
    return dataclasses.replace(later, **{name: max(getattr(earlier, name), getattr(later, name)) for name in peaks})


def parse_status(text: str) -> CpuMemory:
    """Parse VmRSS and VmHWM (kB) from the text of /proc/PID/status; raises KeyError if one is missing."""
    kib = dict(_STATUS_LINES.findall(text))
    return CpuMemory(resident=int(kib["VmRSS"]) / 1024, peak_resident=int(kib["VmHWM"]) / 1024)


def cuda_memory(stats: Mapping[str, int]) -> CudaMemory:
    """Convert `torch.cuda.memory_stats()` (bytes; empty before CUDA is initialised, which counts as 0)."""
    values = {}
    for name, key in (("allocated", "allocated"), ("cached", "reserved"), ("inactive", "inactive_split")):
        values[name] = stats.get(f"{key}_bytes.all.current", 0) / MIB
        values[f"max_{name}"] = stats.get(f"{key}_bytes.all.peak", 0) / MIB
    return CudaMemory(**values)


class _Gauge:
    """A high-water mark of this process, and the monitors that share it."""

    method = "exact"

    def __init__(self) -> None:
        self.watchers: weakref.WeakSet[PeakMonitor] = weakref.WeakSet()

    def watch(self, monitor: "PeakMonitor") -> None:
        self.watchers.add(monitor)

    def read(self) -> CpuMemory | CudaMemory:
        raise NotImplementedError

    def _clear(self) -> None:
        raise NotImplementedError

    def reset(self) -> CpuMemory | CudaMemory:
        """Read the mark, fold it into every watcher's maxima, then reset it to the memory held now."""
        reading = self.read()
        for monitor in tuple(self.watchers):
            monitor.fold(reading)
        self._clear()
        return reading


class _ResidentGauge(_Gauge):
    """The kernel's mark of resident memory, exact to a few pages per thread.

    The two files stay open, which makes a reading three times as fast; a forked process has a gauge of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._status = os.open(_STATUS, os.O_RDONLY)
        self._clear_refs = os.open(_CLEAR_REFS, os.O_WRONLY)

    def read(self) -> CpuMemory:
        return parse_status(os.pread(self._status, _STATUS_BYTES, 0).decode())

    def _clear(self) -> None:
        # proc(5): writing 5 resets only the peak resident set size, to the current size.
        os.pwrite(self._clear_refs, b"5", 0)


class _SampledResidentGauge(_Gauge):
    """A mark for systems that cannot reset the kernel's: a thread samples every 5 ms and may miss a shorter peak."""

    method = "sampled"

    def __init__(self) -> None:
        super().__init__()
        self._process, self._peak = psutil.Process(), 0.0
        self._thread: threading.Thread | None = None

    def watch(self, monitor: "PeakMonitor") -> None:
        super().watch(monitor)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._sample, name="memopt-resident", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        pause = threading.Event()
        while self.watchers:
            self.read()
            pause.wait(_SAMPLE_SECONDS)

    def read(self) -> CpuMemory:
        resident = self._process.memory_info().rss / MIB
        self._peak = max(self._peak, resident)
        return CpuMemory(resident=resident, peak_resident=self._peak)

    def _clear(self) -> None:
        self._peak = 0.0


class _CudaGauge(_Gauge):
    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def read(self) -> CudaMemory:
        return cuda_memory(torch.cuda.memory_stats(self._index))

    def _clear(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)


def can_reset_resident_peak() -> bool:
    """True if this system resets VmHWM on request; tests it, since some sandboxes accept the write and ignore it."""
    try:
        with mmap.mmap(-1, _PROBE_BYTES) as pages:
            for offset in range(0, _PROBE_BYTES, mmap.PAGESIZE):
                pages[offset] = 1
            raised = parse_status(_STATUS.read_text()).peak_resident
        _CLEAR_REFS.write_text("5")
        return raised - parse_status(_STATUS.read_text()).peak_resident > _PROBE_BYTES / MIB / 2
    except (OSError, KeyError):
        return False


@functools.cache
def _gauge(index: int | None, pid: int) -> _Gauge:
    if index is not None:
        return _CudaGauge(index)
    return _ResidentGauge() if can_reset_resident_peak() else _SampledResidentGauge()


def _cuda_index(device: torch.device) -> int | None:
    """Returns a CUDA device's index (for `cuda` the current device's, so that both share a mark); None for others."""
    if device.type != "cuda":
        return None
    if device.index is None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return device.index or 0


class PeakMonitor:
    """Measures the peak memory of this process in a phase and in a run; several monitors can be active at once.

    Code that resets torch's peak statistics or VmHWM on its own (Trainer with
    `skip_memory_metrics=False` does on CUDA) hides earlier peaks from all monitors.

    Args:
        device: CUDA devices are read from torch's allocator, every other device as resident memory of the process.

    Attributes:
        method: `exact`, or `sampled` if the system cannot reset the mark of resident memory.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._gauge = _gauge(_cuda_index(self._device), os.getpid())
        self._phase: CpuMemory | CudaMemory | None = None
        self._run_peak = 0.0
        self.method = self._gauge.method

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy keeps the readings so far; the mark belongs to the process.
        return PeakMonitor, (self._device,), {"_phase": self._phase, "_run_peak": self.run_peak}

    def start_run(self) -> None:
        self._gauge.reset()
        self._phase, self._run_peak = None, 0.0
        self._gauge.watch(self)

    def start_phase(self) -> CpuMemory | CudaMemory:
        """Begin a phase, and return the reading of the phase before it, as `read()` does (takes under 0.1 ms)."""
        reading, self._phase = merged(self._phase, self._gauge.reset()), None
        return reading

    def read(self) -> CpuMemory | CudaMemory:
        """Returns the memory held now, and the peaks since `start_phase()`, in MiB."""
        return merged(self._phase, self._gauge.read())

    @property
    def run_peak(self) -> float:
        """Returns the peak from `start_run()` until `end_run()`: resident on the CPU, allocated on CUDA, in MiB."""
        if self in self._gauge.watchers:
            return max(self._run_peak, peak(self._gauge.read()))
        return self._run_peak

    def end_run(self) -> None:
        """Freeze `run_peak`; the sampling thread ends with the last run."""
        self._run_peak = self.run_peak
        self._gauge.watchers.discard(self)

    def fold(self, reading: CpuMemory | CudaMemory) -> None:
        self._phase = merged(self._phase, reading)
        self._run_peak = max(self._run_peak, peak(reading))


def held_bytes(device: torch.device) -> int:
    """Returns the bytes that this process holds now: on CUDA allocated by torch, else resident."""
    return round(held(PeakMonitor(device).read()) * MIB)


def peak_bytes(device: torch.device) -> int:
    """Returns the high-water mark of `held_bytes` since its last reset, by any code."""
    return round(peak(PeakMonitor(device).read()) * MIB)
