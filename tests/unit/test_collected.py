"""What is kept of a run for the page about it."""

from optimum_memopt import InputDensityCallback, MemoryPhasesCallback
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.report.data import CollectingCallback, thinned
from tests.trackers import Tracker


def test_phases_of_the_highest_step_and_densities_of_all(trainer_of):
    collected, tracker = CollectingCallback(), Tracker()
    trainer = trainer_of([MemoryPhasesCallback(), InputDensityCallback(), collected, tracker], max_steps=4)
    trainer.train()
    peaks = {
        entry["step"]: max(value for name, value in entry.items() if name.endswith("/peak_resident_mib"))
        for entry in tracker.ours
        if "memopt/post_forward/resident_mib" in entry
    }
    assert sorted(peaks) == [1, 2, 3, 4]
    del peaks[1]
    assert collected.phases.step in peaks and collected.phases.peak == round(max(peaks.values()) * MIB)
    assert [phase.name for phase in collected.phases.phases] == [
        "pre_forward",
        "post_forward",
        "pre_backward",
        "post_backward",
        "post_optimizer_step",
    ]
    logged = [
        (entry["step"], entry["memopt/density/input_ids"])
        for entry in tracker.ours
        if "memopt/density/input_ids" in entry
    ]
    assert collected.densities["input_ids"] == logged and len(logged) == 4
    assert collected.densities.keys() == {"input_ids", "labels"}


def test_a_run_of_one_step_has_its_phases_and_the_next_run_its_own(trainer_of):
    collected = CollectingCallback()
    trainer = trainer_of([MemoryPhasesCallback(), collected], max_steps=1)
    trainer.train()
    assert collected.phases.step == 1 and not collected.densities
    first = collected.phases
    trainer.train()
    assert collected.phases is not first


def test_long_runs_are_thinned():
    points = list(range(9))
    assert thinned(points, 9) == points
    assert thinned(points, 8) == [0, 2, 4, 6, 8]
    assert thinned(range(8), 7) == [0, 2, 4, 6, 7]
