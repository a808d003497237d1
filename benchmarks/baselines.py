"""The baselines of frontier.py, and the largest batch that each of them trains under a memory cap.

python benchmarks/baselines.py < baseline.json
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optimum_memopt import measure as measuring
from optimum_memopt.errors import MemOptError
from optimum_memopt.measure import Case, Measurement
from optimum_memopt.sizes import MIB

if TYPE_CHECKING:
    import torch

# Compilers of the compile engine, and the `torch.compile` backends to compare with. `aot_eager` uses inductor's
# partitioner and runs PyTorch's operators one by one. `aot_eager_decomp_partition` decomposes them first and needs
# more memory and time (RoBERTa with 6 layers: 424 MiB against 406, with a budget of 0.1 315 against 298).
COMPILERS = ("aot_eager", "inductor")
EAGER = "eager"
FAMILIES = (EAGER, "checkpointing", "torch.compile", "budget", "compile", "ort")
_LEVELS = {"no plan": {}, "level 1": {"memory_opt_level": 1}, "level 2": {"memory_opt_level": 2}}
_NO_MEMORY = re.compile(r"out ?of ?memory|can't allocate memory", re.IGNORECASE)


@dataclass(frozen=True)
class Baseline(Case):
    """A case with settings that the package's own command does not have.

    Attributes:
        name: name in the tables.
        family: one of `FAMILIES`.
        activation_checkpointing: whether to use PyTorch's checkpointing in every n-th layer.
        every_n_layers: the n of the checkpointed layers.
        tuned_malloc: whether malloc returns freed blocks to the system, as the engines set it up; False: glibc's
            defaults.
        backend: the `torch.compile` backend; None if the model is not compiled.
        budget: torch's `activation_memory_budget`.
        memory_cap: the most bytes that torch may reserve on CUDA.
    """

    name: str = ""
    family: str = ""
    activation_checkpointing: bool = False
    every_n_layers: int = 1
    tuned_malloc: bool = True
    backend: str | None = None
    budget: float | None = None
    memory_cap: int | None = None

    def prepare(self, model: "torch.nn.Module") -> None:
        import torch

        # Every run of a Trainer has this module in memory, so every baseline must load it.
        from transformers import Trainer  # noqa: F401

        if self.activation_checkpointing:
            model.activation_checkpointing_enable(every_n_layers=self.every_n_layers)
        if not self.tuned_malloc:
            # glibc reads this variable only at start-up; set here, it only stops `measure` from changing malloc's
            # settings.
            os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(128 * 1024))
        if self.budget is not None:
            torch._functorch.config.activation_memory_budget = self.budget
        if self.backend is not None:
            model.compile(backend=self.backend)
        if self.memory_cap is not None and torch.cuda.is_available():
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.memory_cap / total))


def measure(baseline: Baseline) -> Measurement:
    return measuring.spawn(baseline, [__file__])


def baselines(
    make: Callable[..., Baseline], compilers: Sequence[str], every: Sequence[int], budgets: Sequence[float]
) -> Iterator[Baseline]:
    """Yields all baselines except single rows of a plan table.

    Args:
        make: makes a baseline from the given fields; sets workload and steps.
        compilers: compilers of the compile engine and of `torch.compile`.
        every: the values of n for checkpointing every n-th layer.
        budgets: the values of torch's `activation_memory_budget`.
    """
    yield make(name=EAGER, family=EAGER, options=None)
    for compiler in compilers:
        yield _engine(make, compiler, "no plan", _LEVELS["no plan"])
    for n in every:
        name = f"checkpointing, {'all layers' if n == 1 else f'1 of {n} layers'}"
        yield make(name=name, family="checkpointing", options=None, activation_checkpointing=True, every_n_layers=n)
    for compiler in compilers:
        plain = partial(make, options=None, backend=compiler)
        yield plain(name=f"torch.compile, {compiler}", family="torch.compile")
        for budget in budgets:
            yield plain(name=f"budget {budget}, {compiler}", family="budget", budget=budget)
        for level in ("level 1", "level 2"):
            yield _engine(make, compiler, level, _LEVELS[level])
    for name, options in _LEVELS.items():
        yield make(name=f"ort: {name}", family="ort", options={"memory_opt_engine": "ort", **options})


def rows(make: Callable[..., Baseline], compiler: str, none: Measurement, count: int) -> Iterator[Baseline]:
    """Yields a baseline for each of the rows with the largest claimed savings.

    Args:
        make: see `baselines`.
        compiler: compiler of the compile engine.
        none: measurement of the compile engine without a plan.
        count: number of rows.
    """
    for plan in none.table.plans[:count]:
        yield _engine(make, compiler, plan.config.removesuffix(":1:-1"), {"memory_opt_config": plan.config})


def without_plan(compiler: str) -> str:
    """Returns the name of the compile engine's baseline without a plan."""
    return f"compile: no plan, {compiler}"


def _engine(make: Callable[..., Baseline], compiler: str, name: str, options: Mapping[str, Any]) -> Baseline:
    own = {"memory_opt_engine": "compile", "memory_opt_compiler": compiler, **options}
    return make(name=f"compile: {name}, {compiler}", family="compile", options=own)


def largest_batch(fits: Callable[[int], bool], guess: int, step: int) -> int:
    """Returns the largest multiple of `step` that fits, 0 if none does.

    Args:
        fits: True up to some batch size, False above it.
        guess: the batch size to try first.
        step: the step between batch sizes.
    """
    low, high, jump = 0, None, step
    candidate = max(step, guess // step * step)
    while True:
        if fits(candidate):
            low = candidate
        else:
            high = candidate
        if high is not None and high - low <= step:
            return low
        if high is None:
            candidate = low + jump
        elif low == 0:
            candidate = max(step, high - jump)
        else:
            candidate = (low + high) // 2 // step * step
        jump *= 2


def capped(baseline: Baseline, cap: int, step: int) -> Baseline:
    """Returns the baseline with the largest batch that it can train under the cap.

    Raises:
        MemOptError: no batch fits, or the baseline fails for another reason.
    """
    with_cap = replace(baseline, memory_cap=cap, optimizer=True)

    def with_batch(batch_size: int) -> Baseline:
        return replace(with_cap, workload=replace(with_cap.workload, batch_size=batch_size))

    def fits(batch_size: int) -> bool:
        try:
            return measure(with_batch(batch_size)).peak_mib * MIB <= cap
        except MemOptError as error:
            if _NO_MEMORY.search(str(error)):
                return False
            raise

    small = measure(with_batch(step))
    guess = step * (cap / MIB - small.held_mib) / small.activations_mib
    found = largest_batch(fits, int(guess), step)
    if found == 0:
        raise MemOptError(f"a batch of {step} does not fit")
    return with_batch(found)


if __name__ == "__main__":
    measuring.main(Baseline)
