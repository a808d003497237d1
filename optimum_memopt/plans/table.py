"""The plan table: a training step's saved activations, each plan's saving, and whether it is on; as text and JSON."""

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

import sympy
from sympy.parsing.sympy_parser import parse_expr
from tabulate import tabulate

_DIMENSION = re.compile(r"^(?:inputs_)?(?P<input>\w+)_dim(?P<dim>\d+)$")
# Inputs that share their dimensions with `input_ids` whenever both are given (transformers' model signatures).
_LIKE_INPUT_IDS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "bbox")
_LIKE_DECODER_INPUT_IDS = ("decoder_input_ids", "decoder_attention_mask", "decoder_position_ids")


@dataclass(frozen=True)
class PlanRow:
    """One row of the table.

    Attributes:
        config: `cluster_id:strategy:-1`; several joined by commas if they only save memory together.
        frequency: number of occurrences in the graph.
        saving_bytes: bytes of saved activations that the plan frees in the first batch, None if a size is unknown.
        saving_symbolic: `saving_bytes` as a formula in the batch's dimensions.
        requested_count: number of requested occurrences (-1 all, 0 none).
        applied_count: number of occurrences that the engine reports as applied.
        note: why a level leaves the row out, or which other spelling of the id was requested.
        measured_saving_bytes: how much this row alone lowered the measured peak (negative: raised it), None if it was
            not measured.
        applied_saving_bytes: `saving_bytes` of the applied occurrences, None if the engine applies all or none.
    """

    config: str
    frequency: int
    saving_bytes: int | None
    saving_symbolic: str
    requested_count: int = 0
    applied_count: int = 0
    note: str = ""
    measured_saving_bytes: int | None = None
    applied_saving_bytes: int | None = None

    @property
    def is_on(self) -> bool:
        return self.applied_count != 0

    @property
    def cluster_ids(self) -> tuple[str, ...]:
        return tuple(part.split(":")[0] for part in self.config.split(","))


@dataclass(frozen=True)
class PlanTable:
    """All plans of one training graph, largest saving first, ties by config, so that tables of runs are comparable.

    Attributes:
        symbols: maps symbolic dimensions to their values in the first batch.
        header: lines above the table (device, level, fallback).
    """

    engine: str
    plans: tuple[PlanRow, ...]
    symbols: Mapping[str, int] = field(default_factory=dict)
    header: tuple[str, ...] = ()

    @property
    def enabled(self) -> tuple[PlanRow, ...]:
        return tuple(plan for plan in self.plans if plan.is_on)

    @property
    def claimed_saving_bytes(self) -> int:
        """Returns the sum over the rows that are on; not the peak's reduction: the tensors live at different times."""
        return sum(
            (plan.saving_bytes or 0) if plan.applied_saving_bytes is None else plan.applied_saving_bytes
            for plan in self.enabled
        )

    def with_measured(self, savings: Mapping[str, int | None]) -> "PlanTable":
        """Returns a copy of the table with a measured column.

        Args:
            savings: maps a row's config to its `measured_saving_bytes`.
        """
        plans = (replace(plan, measured_saving_bytes=savings.get(plan.config)) for plan in self.plans)
        return replace(self, plans=tuple(plans))

    def to_text(self) -> str:
        grid = tabulate(self._columns(), headers="keys", tablefmt="simple", disable_numparse=True)
        return "\n".join([*self._lines_above, grid, *self._lines_below])

    __str__ = to_text

    def _repr_html_(self) -> str:
        grid = tabulate(self._columns(), headers="keys", tablefmt="html", disable_numparse=True)
        above, below = ("<br>".join(map(html.escape, lines)) for lines in (self._lines_above, self._lines_below))
        return f"<div><p>{above}</p>{grid}<p>{below}</p></div>"

    @property
    def _lines_above(self) -> tuple[str, ...]:
        return f"Memory plans of the {self.engine} engine", *self.header

    @property
    def _lines_below(self) -> tuple[str, ...]:
        symbols = ", ".join(f"{name}={value}" for name, value in sorted(self.symbols.items()))
        return (
            f"First batch: {symbols}",
            f"On: {len(self.enabled)} of {len(self.plans)} plans, claimed saving {self.claimed_saving_bytes:,} bytes "
            f"({self.claimed_saving_bytes / 2**20:.1f} MiB) of saved activations; the memory phases measure the peak",
        )

    def _columns(self) -> dict[str, list[object]]:
        columns: dict[str, list[object]] = {
            "Plan": list(range(1, len(self.plans) + 1)),
            "": ["ON" if plan.is_on else "OFF" for plan in self.plans],
            "Config": [plan.config for plan in self.plans],
            "Freq": [plan.frequency for plan in self.plans],
            "Max Saving(Bytes)": [_bytes(plan.saving_bytes, "unknown") for plan in self.plans],
            "Measured(Bytes)": [_bytes(plan.measured_saving_bytes, "") for plan in self.plans],
            "Saving Symbolic(Bytes)": [plan.saving_symbolic for plan in self.plans],
            "Requested": [plan.requested_count for plan in self.plans],
            "Applied": [plan.applied_count for plan in self.plans],
            "Note": [plan.note for plan in self.plans],
        }
        for optional in ("Measured(Bytes)", "Saving Symbolic(Bytes)", "Note"):
            if not any(columns[optional]):
                del columns[optional]
        return columns

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PlanTable":
        data = json.loads(text)
        plans = tuple(PlanRow(**plan) for plan in data["plans"])
        return cls(data["engine"], plans, data["symbols"], tuple(data["header"]))


def _bytes(count: int | None, otherwise: str) -> str:
    return otherwise if count is None else f"{count:,}"


def sorted_plans(plans: Iterable[PlanRow]) -> tuple[PlanRow, ...]:
    """Returns the plans sorted: largest saving first, unknown savings last, ties by config."""
    return tuple(sorted(plans, key=lambda plan: (plan.saving_bytes is None, -(plan.saving_bytes or 0), plan.config)))


def canonical_symbols(values: Mapping[str, int], is_encoder_decoder: bool = False) -> dict[str, str]:
    """Returns one canonical name for each dimension that several inputs share; exporters pick a name at random.

    Inputs share a dimension if they are known to (attention_mask and input_ids; dimension 0 of every input) and the
    values agree in this batch.

    Args:
        values: maps `<input>_dim<k>` to its value in the first batch; canonical names are `inputs_<input>_dim<k>`.
        is_encoder_decoder: whether labels have the decoder's length instead of the length of `input_ids`.
    """
    encoder, decoder = list(_LIKE_INPUT_IDS), list(_LIKE_DECODER_INPUT_IDS)
    (decoder if is_encoder_decoder else encoder).append("labels")
    order = encoder + decoder
    parsed = {name: (match["input"], int(match["dim"])) for name in values if (match := _DIMENSION.match(name))}

    def rank(name: str) -> tuple[bool, int, str]:
        return name == "labels", order.index(name) if name in order else len(order), name

    names = {}
    for name, (input_name, dim) in parsed.items():
        family = next((family for family in (encoder, decoder) if input_name in family), [input_name])
        shared = (
            other
            for other_name, (other, other_dim) in parsed.items()
            if other_dim == dim and (dim == 0 or other in family) and values[other_name] == values[name]
        )
        names[name] = f"inputs_{min(shared, key=rank)}_dim{dim}"
    return names


def simplified(expression: str, names: Mapping[str, str]) -> sympy.Expr:
    """Returns a formula with dimension names replaced by canonical ones, expanded, common factors pulled out."""
    symbols = {old: sympy.Symbol(new, integer=True, positive=True) for old, new in names.items()}
    exact = sympy.nsimplify(parse_expr(expression, local_dict=symbols), rational=True)
    return sympy.factor_terms(sympy.expand(exact))


def evaluated(expression: sympy.Expr, values: Mapping[str, int]) -> int | None:
    """Returns the formula's value in bytes, None if a symbol has no value."""
    known = {symbol: values[symbol.name] for symbol in expression.free_symbols if symbol.name in values}
    result = expression.subs(known)
    return round(float(result)) if result.is_number else None
