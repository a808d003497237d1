import torch
import transformers

from optimum_memopt.measure import Case, measure
from optimum_memopt.memory.capacity import capacity
from optimum_memopt.memory.peak_monitor import PeakMonitor
from optimum_memopt.predict.workload import Workload

MIB = 2**20


def test_a_device_has_one_mark_whatever_it_is_called():
    run, phases = PeakMonitor("cuda"), PeakMonitor(f"cuda:{torch.cuda.current_device()}")
    run.start_run()
    phases.start_run()
    before = run.run_peak
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    phases.start_phase()
    assert run.run_peak - before >= 64
    assert phases.run_peak == run.run_peak


def test_a_process_has_its_fraction_of_the_device():
    whole = capacity(torch.device("cuda"))
    try:
        torch.cuda.set_per_process_memory_fraction(0.25)
        quarter = capacity(torch.device("cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert abs(quarter.total - whole.total // 4) < MIB
    assert quarter.available < min(whole.available, quarter.total)


def test_what_other_processes_take_is_not_measured(tmp_path, monkeypatch):
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    config.save_pretrained(tmp_path)
    case = Case(Workload(str(tmp_path), "fill-mask", 4, 32), options=None)
    alone = measure(case)
    asked = 0

    def others_grow(device: object = None) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return 80 * 2**30 - asked * 2**30, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", others_grow)
    beside_others = measure(case)
    assert beside_others.activations_mib == alone.activations_mib
