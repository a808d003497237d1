"""Plain PyTorch in the place of a first step whose compiled forward or backward fails."""

import gc
import traceback
from collections.abc import Callable
from typing import Any

from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.plan_file import FromPlanFile
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.torch_compat.runtime import failure_of_compiler
from optimum_memopt.errors import MemOptError, UnsupportedModelError, is_out_of_memory, line_of
from optimum_memopt.logs import get_logger
from optimum_memopt.plans.table import PlanTable


def own_error(error: BaseException) -> BaseException | None:
    """An error that is no fault of a compiler's: a refusal, a lack of memory, an interrupt; None for any other.

    Args:
        error: of a compiled forward or backward; what torch has wrapped is returned as it was.
    """
    inner = getattr(error, "inner_exception", None) or error
    is_own = not isinstance(inner, Exception) or isinstance(inner, MemOptError) or is_out_of_memory(inner)
    return inner if is_own else None


def outputs_instead(failed: Exception, plain: Callable[[], Any], producer: Producer) -> tuple[Any, PlanTable]:
    """Run plain PyTorch where the compiled forward has failed: its outputs, and a table that says so.

    Args:
        failed: the error.
        plain: the model's own forward.
        producer: whose plan there would have been.

    Raises:
        UnsupportedModelError: the plan must hold.
        Exception: plain PyTorch's own, where it fails too.
    """
    # They hold what the graphs that have run saved for the backward.
    traceback.clear_frames(failed.__traceback__)
    gc.collect()
    if why := failure_of_compiler(failed):
        table = without_plan(producer, why, failed)
        return plain(), table
    why = f"its compiled forward failed in the first step ({line_of(failed)})"
    try:
        outputs = plain()
    except Exception as error:
        if is_out_of_memory(error):
            without_plan(producer, why, failed)
        raise
    return outputs, without_plan(producer, why, failed)


def without_plan(producer: Producer, why: str, failed: Exception | None = None) -> PlanTable:
    """Say that plain PyTorch trains the model from now on; the table has that line alone.

    Args:
        producer: whose plan there would have been.
        why: there is none.
        failed: the error that has led to it.

    Raises:
        UnsupportedModelError: the plan must hold.
    """
    instead = "it trains as plain PyTorch, and --gradient_checkpointing recomputes its layers"
    if isinstance(producer, FromBudget):
        text = f"--memory_opt_budget {producer.budget.text}: {why}, so that nothing can be planned"
        raise UnsupportedModelError(text, f"without a budget {instead}") from failed
    if isinstance(producer, FromPlanFile):
        text = f"--memory_opt_plan: {why}, so that the file cannot be applied"
        raise UnsupportedModelError(text, f"without the file {instead}") from failed
    line = f"NOT under a plan: {why}"
    get_logger().warning(line)
    return PlanTable(engine="compile", plans=(), header=(line,))
