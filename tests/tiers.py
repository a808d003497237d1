"""Which tests `make check` and `make test` take; `docs/testing.md` has the tiers."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Folders and files whose tests train through an engine, a Trainer, a launcher or a command: not in `make check`, which
# does not even import them. Elsewhere single tests have the mark.
END_TO_END = (
    "advise/test_in_trainer",
    "benchmarks/test_observers",
    "callbacks/test_memory_phases",
    "callbacks/test_plan_stats",
    "callbacks/test_trl",
    "commands",
    "ecosystem",
    "engines/compile/budget/test_graph_breaks",
    "engines/compile/budget/test_mixed",
    "engines/compile/budget/test_solve",
    "engines/compile/loss/test_chain",
    "engines/compile/loss/test_engine",
    "engines/compile/loss/test_trainer",
    "engines/compile/steps",
    "engines/compile/test_backend",
    "engines/compile/test_backward_again",
    "engines/compile/test_caveat",
    "engines/compile/test_detach_outputs",
    "engines/compile/test_estimate",
    "engines/compile/test_fallback",
    "engines/compile/test_hooks",
    "engines/compile/test_inductor",
    "engines/compile/test_best_effort",
    "engines/compile/test_mistyped_config",
    "engines/compile/test_offload",
    "engines/compile/test_plan_file",
    "engines/compile/test_planned_run",
    "engines/compile/test_random_plans",
    "engines/compile/test_recompiles",
    "engines/compile/test_several_forwards",
    "engines/compile/test_step_memory",
    "engines/compile/test_trace_fixes",
    "engines/ort",
    "engines/test_auto",
    "engines/test_key_value_cache",
    "examples/test_models",
    "examples/test_verses",
    "engines/test_registration",
    "integration",
    "measure/test_measure_case",
    "memory/test_malloc",
    "report/test_training",
    "test_any_options",
    "test_checkpointing",
    "test_matrix",
    "test_optimize",
    "test_packaging",
    "test_planning",
    "test_script",
    "test_trainer",
    "training/test_loss_only",
    "training/test_optimizers",
)
# The files among them that train nothing.
UNIT = (
    "engines/ort/test_extension_sources",
    "engines/ort/test_graph_plans",
)

# Files that look at graphs which `engines/compile/conftest.py` traces once a process: one worker takes all of them.
OF_CAPTURED_GRAPHS = (
    "engines/compile/budget/test_costs",
    "engines/compile/budget/test_curve",
    "engines/compile/budget/test_several_graphs",
    "engines/compile/budget/test_simulation",
    "engines/compile/budget/test_variant_lengths",
    "engines/compile/steps/test_replay",
    "engines/compile/test_backend",
    "engines/compile/test_barriers",
    "engines/compile/test_candidates",
    "engines/compile/test_joint",
    "engines/compile/test_liveness",
    "engines/compile/test_naming",
    "engines/compile/test_partition",
    "engines/compile/test_saved_activations",
    "engines/compile/test_selection",
    "engines/compile/test_step_timeline",
    "engines/compile/test_strategies",
    "engines/compile/test_table",
    "engines/compile/test_timeline",
)


def is_end_to_end(path: str) -> bool:
    """Whether a test file, by its path below this folder, is no unit test."""
    return path.startswith(END_TO_END) and not path.startswith(UNIT)


def tiered(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `make test` runs the `fast` ones, `make test-all` all of them.

    Args:
        values: one a test, or a tuple of several arguments.
        fast: those of the values, first arguments or names of functions among them, that are not slow.
    """
    return [
        pytest.param(*_arguments(value), marks=[] if _is_in(value, fast) else [pytest.mark.slow]) for value in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_in(value: Any, fast: Collection[Any]) -> bool:
    first = value[0] if isinstance(value, tuple) else value
    return value in fast or first in fast or getattr(value, "__name__", None) in fast
