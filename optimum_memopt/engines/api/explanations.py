"""Why memory ran out in a training step: what was held, when, and what would have fit. Pure."""

import inspect
import json
import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.sizes import gib_text

if TYPE_CHECKING:
    from optimum_memopt.engines.api.engine import Engine


FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "optimizer's step"
NAME = "memory_report"
# Rows of saved activations and temporaries on the screen; the files have all.
_SHOWN = 5


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind that were held.

    Attributes:
        row: of the plan table, as `Gelu+:1:-1`, where they have one; else the operator that makes them.
        layer: path of the transformer layer; empty outside of layers.
        bytes: of all of them.
    """

    row: str
    layer: str
    bytes: int


@dataclass(frozen=True)
class Part:
    """A category of what was held.

    Attributes:
        category: one of `predictions.CATEGORIES`.
        bytes: of the device's memory, of a CPU's process resident.
        tensors: what it is made of, largest first; empty where that is not known.
    """

    category: str
    bytes: int
    tensors: tuple[Tensors, ...] = ()


@dataclass(frozen=True)
class Moment:
    """Where in the step the allocation failed.

    Attributes:
        phase: `forward`, `backward` or `optimizer's step`.
        layer: path of the layer or module; empty where it is outside of all, or not known.
        operator: as `gelu`; empty where it is not known.
        is_exact: the error's traceback names the operator; else it is the one at which the prediction holds as much
            as was held.
    """

    phase: str
    layer: str = ""
    operator: str = ""
    is_exact: bool = False

    def __str__(self) -> str:
        of = f"operator {self.operator}" if self.operator else ""
        within = f"in {self.layer}" if self.layer else ""
        known = " ".join(filter(None, (of, within)))
        about = "" if self.is_exact or not self.operator else "at about "
        return f"{self.phase}, {about}{known}" if known else self.phase


@dataclass(frozen=True)
class WayOut:
    """What would have fit.

    Attributes:
        flags: to add to the command line, or to replace there.
        peak: predicted bytes of a step with it.
        extra_time: as a share of forward and backward; None: not known.
        what: what it does, in a few words.
    """

    flags: str
    peak: int
    extra_time: float | None
    what: str


@dataclass(frozen=True)
class MemoryReport:
    """A training step that ran out of memory.

    Attributes:
        error: its first line.
        step: optimizer steps that were done before.
        rank: of the process.
        model: its class.
        device: type of its device, as `cuda`.
        engine: what trained it, and under which plan.
        rows: of the micro-batch that failed.
        accumulation: micro-batches of an optimizer step.
        sizes: of that micro-batch, by input: `input_ids` to `64 x 128`.
        held: bytes when the allocation failed: on CUDA allocated, on a CPU resident.
        requested: bytes of that allocation; None: the error does not say.
        moment: where in the step.
        parts: what was held, in the order of the categories.
        ways_out: what would have fit, the recommended one first.
        remarks: what is not exact or not known, a line each.
    """

    error: str
    step: int
    rank: int
    model: str
    device: str
    engine: str
    rows: int
    accumulation: int
    sizes: Mapping[str, str]
    held: int
    requested: int | None
    moment: Moment
    parts: tuple[Part, ...]
    ways_out: tuple[WayOut, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def accounted(self) -> float:
        """The share of `held` that the parts add up to."""
        return sum(part.bytes for part in self.parts) / self.held if self.held else 0.0

    def to_text(self) -> str:
        """One screen."""
        lines = [
            *self._heading,
            "",
            "held at that moment",
            *(_row(part.category, part.bytes, part.bytes / self.held) for part in self.parts if part.bytes),
            f"  {'accounted for':<60}{self.accounted:>20.1%}",
        ]
        for part in self.parts:
            if shown := _by_row(part.tensors)[:_SHOWN]:
                lines += ["", f"largest {part.category}"]
                lines += [_row(f"{row}{layers}", size, size / self.held) for row, layers, size in shown]
        lines += [
            "",
            "what would have fit",
            *(map(_way_line, self.ways_out) if self.ways_out else ["  nothing found"]),
        ]
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])

    def to_markdown(self) -> str:
        """The same as tables, with all rows."""
        lines = [f"# {self._heading[0]}", "", *(f"{line.strip()}  " for line in self._heading[1:]), ""]
        lines += ["## Held at that moment", "", "| category | bytes | share |", "|---|---:|---:|"]
        lines += [
            f"| {part.category} | {gib_text(part.bytes)} | {part.bytes / self.held:.1%} |" for part in self.parts
        ]
        lines += [f"| accounted for | | {self.accounted:.1%} |", ""]
        for part in self.parts:
            if part.tensors:
                lines += [f"## {part.category.capitalize()}", "", "| row | layer | bytes |", "|---|---|---:|"]
                lines += [f"| {each.row} | {each.layer} | {gib_text(each.bytes)} |" for each in part.tensors] + [""]
        lines += ["## What would have fit", ""]
        if self.ways_out:
            lines += ["| flags | predicted peak | time | |", "|---|---:|---:|---|"]
            lines += [f"| `{way.flags}` | {gib_text(way.peak)} | {_time(way)} | {way.what} |" for way in self.ways_out]
        else:
            lines += ["Nothing was found."]
        return "\n".join([*lines, "", *(f"- {remark}" for remark in self.remarks), ""])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(replace(self, sizes={}))
        return {**found, "sizes": dict(self.sizes), "accounted": self.accounted}

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write `memory_report.json` and `memory_report.md`; of a rank beside the first with its number.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = NAME if self.rank == 0 else f"{NAME}_rank{self.rank}"
        written = {".json": json.dumps(self.to_dict(), indent=1) + "\n", ".md": self.to_markdown()}
        for suffix, text in written.items():
            (folder / f"{name}{suffix}").write_text(text, encoding="utf-8")
        return tuple(folder / f"{name}{suffix}" for suffix in written)

    @property
    def _heading(self) -> list[str]:
        rank = f" on rank {self.rank}" if self.rank else ""
        more = f", and {gib_text(self.requested)} more did not fit" if self.requested else ""
        sizes = ", ".join(f"{name} {shape}" for name, shape in self.sizes.items())
        accumulated = f", {self.accumulation} of them an optimizer step" if self.accumulation > 1 else ""
        return [
            f"memory ran out in step {self.step + 1}{rank}: {gib_text(self.held)} held{more}",
            f"  {self.model} on {self.device}, {self.engine}",
            f"  micro-batch of {self.rows} rows{accumulated} ({sizes})",
            f"  {self.moment}",
        ]


def _row(name: str, size: int, share: float) -> str:
    return f"  {name:<60}{gib_text(size):>12}{share:>8.1%}"


def _way_line(way: WayOut) -> str:
    return f"  {way.flags}\n      predicted peak {gib_text(way.peak)}, time {_time(way)}: {way.what}"


def _time(way: WayOut) -> str:
    return "not known" if way.extra_time is None else f"{way.extra_time:+.1%}"


def _by_row(tensors: Sequence[Tensors]) -> list[tuple[str, str, int]]:
    """Row, in how many layers, bytes; largest first."""
    rows: dict[str, list[Tensors]] = {}
    for each in tensors:
        rows.setdefault(each.row, []).append(each)
    found = []
    for row, members in rows.items():
        layers = {each.layer for each in members if each.layer}
        where = f" in {len(layers)} layers" if len(layers) > 1 else f" in {next(iter(layers))}" if layers else ""
        found.append((row, where, sum(each.bytes for each in members)))
    return sorted(found, key=lambda item: -item[2])


# Code that torch.fx has generated: `gelu = torch.ops.aten.gelu.default(addmm);  addmm = None`.
_GENERATED = "<eval_with_key>"
_ASSIGNMENT = re.compile(r"\s*(?P<node>\w+)(?:: [^=]*)? = torch\.ops\.\w+\.(?P<operator>\w+)")
_AUTOGRAD = "torch/autograd/graph.py"


@dataclass(frozen=True)
class TensorLike:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLike":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class ForwardCall:
    """What a model's training forward was called with; tensors are `TensorLike`.

    Attributes:
        args: of the forward.
        kwargs: of the forward.
        reader: who may read more of the outputs than the loss, empty when nobody does.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reader: str

    @property
    def tensors(self) -> dict[str, TensorLike]:
        """Those that have a name."""
        return {name: value for name, value in self.kwargs.items() if isinstance(value, TensorLike)}


@dataclass(frozen=True)
class Place:
    """What a traceback tells of where an allocation failed.

    Attributes:
        phase: of the step.
        module: path of the innermost module whose forward ran; empty in a backward.
        node: of a graph that torch.fx has generated code for; empty in other code.
        operator: that this node calls.
    """

    phase: str
    module: str = ""
    node: str = ""
    operator: str = ""


@dataclass(frozen=True)
class FailedStep:
    """A forward and backward that ran out of memory. What they had allocated is free again.

    Attributes:
        model: without wrappers.
        call: of its forward.
        place: where it failed.
        held: bytes at that moment.
        requested: bytes of the allocation that failed; None: not known.
        kept: what the step has freed and a CPU's malloc has not returned.
        outside: bytes that were there before the step and belong to no tensor of the model, optimizer or batch.
        accumulated: bytes of gradients that earlier micro-batches have left.
        engine: that trained the model; None: plain PyTorch.
        run: it trained in.
        rows: that the data loader takes for a micro-batch.
        accumulation: micro-batches of an optimizer step.
        autocast: its type; None: without.
    """

    model: torch.nn.Module
    call: ForwardCall
    place: Place
    held: int
    requested: int | None
    kept: int
    outside: int
    accumulated: int
    engine: "Engine | None"
    run: Run
    rows: int
    accumulation: int
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Explanation:
    """See `MemoryReport`."""

    moment: Moment
    parts: tuple[Part, ...]
    ways_out: tuple[WayOut, ...]
    remarks: tuple[str, ...] = ()


def place_of(traceback: TracebackType | None, model: torch.nn.Module) -> Place:
    """Read it before the frames are cleared.

    Args:
        traceback: of the error.
        model: whose modules are looked for in its frames.
    """
    names = {module: name for name, module in model.named_modules()}
    phase, module, node, operator = FORWARD, "", "", ""
    while traceback is not None:
        frame, code = traceback.tb_frame, traceback.tb_frame.f_code
        if code.co_filename.replace("\\", "/").endswith(_AUTOGRAD):
            phase, module = BACKWARD, ""
        owner = _self_of(frame)
        if isinstance(owner, torch.nn.Module) and owner in names:
            module = names[owner]
        if code.co_filename.startswith(_GENERATED):
            line = linecache.getline(code.co_filename, traceback.tb_lineno, frame.f_globals)
            if match := _ASSIGNMENT.match(line):
                node, operator = match["node"], match["operator"]
        traceback = traceback.tb_next
    return Place(phase, module, node, operator)


def _self_of(frame: FrameType) -> Any:
    """What a method was called on."""
    if "self" not in frame.f_code.co_varnames:
        return None
    found = frame.f_locals
    owner = found.get("self")
    if isinstance(found, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Before Python 3.13 a copy that stays with the frame, and keeps its tensors when the frame is cleared.
        found.clear()
    return owner
