"""Optimizers with which a step would have fit that ran out of memory in its optimizer. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from optimum_memopt.engines.compile.explain.captured import CapturedGraph
from optimum_memopt.engines.compile.explain.ways_out import (
    Settings,
    Simulate,
    peak_of,
    problems_of,
    together_of,
    within_budget,
)
from optimum_memopt.engines.memory_report import WayOut
from optimum_memopt.progress import Deadline
from optimum_memopt.sizes import gib_text


def other_optimizers(
    planned: Callable[[], Sequence[CapturedGraph]],
    ran: Sequence[CapturedGraph],
    simulate: Simulate,
    settings: Mapping[str, Settings],
    same: str,
    deadline: Deadline,
) -> Iterator[WayOut]:
    """Each with as little recompute as it needs: none, or that of a budget; none where none fits.

    Args:
        planned: see `ways_out`.
        ran: the graphs of the step that failed.
        simulate: what they held.
        settings: of the run with another optimizer, by Trainer's name of it, the recommended one first.
        same: name of the one that computes what the run's own does; empty: none does.
        deadline: for all of them.

    Raises:
        TimeIsUpError: some are not known in time.
    """
    for name, run in settings.items():
        deadline.check()
        states = run.plain.optimizer + run.plain.step
        what = f"states and temporaries of {gib_text(states)}, " + (
            "the same update" if name == same else "another update: the run trains differently"
        )
        activations = peak_of(ran, simulate, problems_of(ran, run))
        peak = replace(run.plain, activations=activations).peak
        # What an allocator wastes is in what was held: forward and backward had run.
        if peak <= run.allowed:
            yield WayOut(f"--optim {name}", peak, None, what)
            continue
        for way in within_budget(together_of(planned(), run), run):
            yield replace(way, flags=f"--optim {name} {way.flags}", what=f"{what}; {way.what}")
