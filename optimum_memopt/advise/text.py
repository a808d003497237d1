"""Advice for a terminal and as JSON. Pure."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from optimum_memopt.advise.advice import Advice, Row
from optimum_memopt.engines.predicted_steps import StepPredictor
from optimum_memopt.sizes import gib_text


def flags(row: Row) -> tuple[str, ...]:
    """What asks for a plan and its micro-batch."""
    return (
        f"--per_device_train_batch_size {row.rows}",
        f"--gradient_accumulation_steps {row.accumulation}",
        "--memory_opt_engine compile",
        *row.plan.flags,
        f"--memory_opt_loss {_loss(row)}",
    )


def to_text(advice: Advice, predictor: StepPredictor) -> str:
    """A table of plans, the recommended one, and its flags."""
    has_accumulation = any(row.accumulation > 1 for row in advice.rows)
    cells = [_cells(row, has_accumulation) for row in advice.rows]
    grid = tabulate(cells, headers="keys", tablefmt="simple", disable_numparse=True)
    tokens = f", {predictor.tokens} tokens a row" if predictor.tokens else ""
    header = (
        f"{predictor.model} on {predictor.device}{tokens}, within {gib_text(predictor.budget)}: each plan at its best "
        f"micro-batch ({predictor.costs} costs)"
    )
    too_large = [
        f"{plan.name}{' with a chunked loss' if plan.chunks_loss else ''} does not fit: {gib_text(peak)} with one row"
        for plan, peak in advice.too_large
    ]
    return "\n".join((header, grid, *too_large, *_recommendation(advice, predictor)))


def to_dict(advice: Advice, predictor: StepPredictor) -> dict[str, Any]:
    """For JSON."""
    return {
        "model": predictor.model,
        "device": predictor.device,
        "costs": predictor.costs,
        "budget": predictor.budget,
        "tokens": predictor.tokens,
        "rows": [_row_dict(row) for row in advice.rows],
        "too_large": [
            {"plan": plan.name, "chunked_loss": plan.chunks_loss, "peak": peak} for plan, peak in advice.too_large
        ],
        "recommended": _row_dict(advice.recommended),
    }


def _cells(row: Row, has_accumulation: bool) -> dict[str, str]:
    bound, share = row.bound
    return {
        "plan": row.plan.name,
        "loss": _loss(row),
        "rows": str(row.rows),
        **({"accumulated": str(row.accumulation)} if has_accumulation else {}),
        "predicted peak": gib_text(row.step.peak),
        "samples/s": f"{row.samples:.1f}",
        "recompute": f"{row.recomputing:.1%}",
        "bound by": f"{bound} {share:.0%}",
    }


def _recommendation(advice: Advice, predictor: StepPredictor) -> Sequence[str]:
    found = advice.recommended
    tokens = f", {found.rows * predictor.tokens:,} tokens" if predictor.tokens else ""
    chosen = f"{found.plan.name}, {_loss(found)} loss, micro-batches of {found.rows} rows{tokens}"
    return (
        "",
        f"Recommended: {chosen}: {found.samples:.1f} samples a second, predicted peak {gib_text(found.step.peak)}"
        f"{_on_host(found)}.",
        *filter(None, (advice.pays,)),
        " ".join(flags(found)),
    )


def _on_host(row: Row) -> str:
    return f" and {gib_text(row.step.host_bytes)} on the host" if row.step.host_bytes else ""


def _loss(row: Row) -> str:
    return "chunked" if row.plan.chunks_loss else "plain"


def _row_dict(row: Row) -> dict[str, Any]:
    bound, share = row.bound
    return {
        "plan": row.plan.name,
        "chunked_loss": row.plan.chunks_loss,
        "rows": row.rows,
        "accumulation": row.accumulation,
        "peak": row.step.peak,
        "host_bytes": row.step.host_bytes,
        "samples_per_second": row.samples,
        "seconds": row.step.by_bound(row.accumulation),
        "bound_by": bound,
        "bound_share": share,
        "recompute_share": row.recomputing,
        "largest": row.largest,
        "flags": list(flags(row)) if row.plan.is_own else [],
    }
