import gc
import time

import pytest
import torch

from optimum_memopt.memory import peak_monitor
from optimum_memopt.memory.peak_monitor import (
    CpuMemory,
    CudaMemory,
    PeakMonitor,
    cuda_memory,
    merged,
    parse_status,
    peak,
)
from optimum_memopt.sizes import MIB

SPIKE = 256  # MiB; above glibc's largest mmap threshold, so that freeing it returns it to the system
SLACK = 48  # MiB for other allocations of the process meanwhile

exact_only = pytest.mark.skipif(not peak_monitor.can_reset_resident_peak(), reason="VmHWM cannot be reset here")


@pytest.fixture(autouse=True)
def _nothing_left_to_free():
    gc.collect()


def spike(until=lambda: True):
    """Allocate memory, and free it once it has been noticed."""
    block = torch.ones(int(SPIKE * MIB) // 4)
    latest = time.monotonic() + 60
    while not until() and time.monotonic() < latest:
        time.sleep(0.01)
    del block


@pytest.fixture
def fresh_gauges():
    peak_monitor._gauge.cache_clear()
    yield
    peak_monitor._gauge.cache_clear()


def test_status_is_read_in_mib():
    text = "Name:\tpython\nVmPeak:\t 9999999 kB\nVmHWM:\t    4096 kB\nVmRSS:\t    2048 kB\nRssAnon:\t  10 kB\n"
    assert parse_status(text) == CpuMemory(resident=2.0, peak_resident=4.0)


def test_allocator_statistics_are_read_in_mib():
    stats = {
        "allocated_bytes.all.current": 1 << 20,
        "allocated_bytes.all.peak": 2 << 20,
        "reserved_bytes.all.current": 3 << 20,
        "reserved_bytes.all.peak": 4 << 20,
        "inactive_split_bytes.all.current": 5 << 20,
        "inactive_split_bytes.all.peak": 6 << 20,
        "allocated_bytes.small_pool.peak": 7 << 20,
    }
    assert cuda_memory(stats) == CudaMemory(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert cuda_memory({}) == CudaMemory(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_merging_keeps_the_later_state_and_the_higher_peaks():
    assert merged(None, CpuMemory(1.0, 2.0)) == CpuMemory(1.0, 2.0)
    assert merged(CpuMemory(9.0, 10.0), CpuMemory(1.0, 2.0)) == CpuMemory(1.0, 10.0)
    assert merged(CudaMemory(9, 9, 9, 1, 9, 9), CudaMemory(1, 2, 3, 4, 5, 6)) == CudaMemory(1, 9, 3, 4, 5, 9)
    assert peak(CpuMemory(1.0, 2.0)) == 2.0
    assert peak(CudaMemory(1, 2, 3, 4, 5, 6)) == 2


@exact_only
def test_a_phase_sees_its_own_peak_and_the_run_keeps_the_highest():
    monitor = PeakMonitor()
    assert monitor.method == "exact"
    monitor.start_run()
    before = monitor.read().resident
    monitor.start_phase()
    spike()
    reading = monitor.read()
    assert reading.peak_resident - before == pytest.approx(SPIKE, abs=SLACK)
    assert reading.resident - before < SLACK
    monitor.start_phase()
    assert monitor.read().peak_resident - before < SLACK
    assert monitor.run_peak - before == pytest.approx(SPIKE, abs=SLACK)


@exact_only
def test_monitors_share_the_mark_without_taking_it_from_each_other():
    one, other = PeakMonitor(), PeakMonitor("cpu")
    one.start_run()
    other.start_run()
    before = one.read().resident
    one.start_phase()
    spike()
    other.start_phase()
    assert one.read().peak_resident - before == pytest.approx(SPIKE, abs=SLACK)
    assert other.read().peak_resident - before < SLACK
    other.start_run()
    assert other.run_peak - before < SLACK
    assert one.run_peak - before == pytest.approx(SPIKE, abs=SLACK)


@exact_only
def test_the_run_peak_is_frozen_at_the_end_of_the_run():
    monitor = PeakMonitor()
    monitor.start_run()
    monitor.end_run()
    frozen = monitor.run_peak
    spike()
    assert monitor.run_peak == frozen


@pytest.mark.parametrize("system", ["refuses", "ignores"])
def test_a_system_that_cannot_reset_the_mark_is_sampled(system, tmp_path, monkeypatch, fresh_gauges):
    clear_refs = tmp_path / "clear_refs"
    if system == "ignores":
        clear_refs.touch()
    else:
        clear_refs = tmp_path / "missing" / "clear_refs"
    monkeypatch.setattr(peak_monitor, "_CLEAR_REFS", clear_refs)
    monitor = PeakMonitor()
    assert monitor.method == "sampled"
    monitor.start_run()
    before = monitor.read().resident
    monitor.start_phase()
    # The thread's own samples count: a reading of the monitor would add one.
    spike(until=lambda: monitor._gauge._peak - before > SPIKE - SLACK)
    assert monitor.read().peak_resident - before == pytest.approx(SPIKE, abs=SLACK)
    monitor.start_phase()
    assert monitor.read().peak_resident - before < SLACK
    assert monitor.run_peak - before == pytest.approx(SPIKE, abs=SLACK)
    thread = monitor._gauge._thread
    assert thread.is_alive()
    monitor.end_run()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_phases():
    monitor = PeakMonitor("cuda:0")
    torch.ones(1, device="cuda:0")
    monitor.start_run()
    before = monitor.read().allocated
    monitor.start_phase()
    block = torch.ones(int(SPIKE * MIB) // 4, device="cuda:0")
    del block
    reading = monitor.read()
    assert reading.max_allocated - before == pytest.approx(SPIKE, abs=1)
    assert reading.allocated == pytest.approx(before)
    assert reading.max_cached >= reading.max_allocated
    monitor.start_phase()
    assert monitor.read().max_allocated == pytest.approx(before)
    assert monitor.run_peak - before == pytest.approx(SPIKE, abs=1)
