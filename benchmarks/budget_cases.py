"""Random models and batches, each trained for one step under a random budget, for budget.py."""

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from allocations import allocated
from budget_graphs import Within, attach
from shared import to_markdown
from tqdm import tqdm

from optimum_memopt.engines.compile.costs.times import costs_of
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.solver.solver import Solver
from tests.model_zoo import ZOO

MODELS = (
    "roberta-mlm",
    "bert-classification",
    "deberta-v2-mlm",
    "electra-mlm",
    "albert-mlm",
    "gpt2",
    "llama",
    "qwen3",
    "t5",
    "opt",
)
# Bytes that are allocated besides the graph's tensors: the loss, offsets.
SLACK = 256
# Further budgets that are solved for, as positions between the lowest peak and everything saved.
_LADDER = (0.2, 0.5, 0.8)


@dataclass(frozen=True)
class Case:
    """A model, its batch, and a budget.

    Attributes:
        model: a name in the tests' model zoo.
        batch_size: rows of the batch.
        length: tokens per row.
        dropout: whether dropout is on.
        bf16: whether the step runs under autocast to bfloat16.
        share: position of the budget between the lowest peak (0) and the peak without a plan (1).
    """

    model: str
    batch_size: int
    length: int
    dropout: bool
    bf16: bool
    share: float


def cases(count: int) -> list[Case]:
    """Returns the first `count` cases of a reproducible sequence that cycles through the models."""
    generator = random.Random(0)
    return [
        Case(
            MODELS[number % len(MODELS)],
            generator.randint(4, 48),
            generator.randint(8, 56),
            generator.random() < 0.5,
            generator.random() < 0.5,
            generator.random(),
        )
        for number in range(count)
    ]


@dataclass(frozen=True)
class Measured:
    """A step under a budget, in bytes.

    Attributes:
        case: the case that was trained.
        budget: the graph's budget, for activations and gradients.
        lowest: the lowest peak that the solver can reach.
        everything: the peak when all activations are saved.
        predicted: the predicted peak of the plan.
        peak: the peak that torch's allocator measured.
        ladder: predicted peaks under growing budgets.
        seconds: the time to compile and run the step.
    """

    case: Case
    budget: int
    lowest: int
    everything: int
    predicted: int
    peak: int
    ladder: tuple[int, ...]
    seconds: float

    @property
    def excess(self) -> int:
        return self.peak - self.budget

    @property
    def is_over(self) -> bool:
        return self.excess > SLACK

    @property
    def use(self) -> float:
        return self.peak / self.budget

    @property
    def falls(self) -> bool:
        """True if no peak is lower under a larger budget."""
        return list(self.ladder) == sorted(self.ladder)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Measured":
        return cls(**{**saved, "case": Case(**saved["case"]), "ladder": tuple(saved["ladder"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _ByShare(Producer):
    """Solves for a budget given by its share, and stores in `found` the lowest and highest peak, the budget and the
    peaks of the ladder."""

    share: float
    found: dict[str, Any] = field(default_factory=dict)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        assert not earlier, "the model's forward is in several graphs"
        costs = costs_of(graph, torch.device("cpu"), fused=False)
        solver = Solver(problem_of(graph, costs.seconds, costs.workspaces))
        low, high = solver.lowest.peak, solver.everything.peak

        def at(share: float) -> int:
            return low + int(share * (high - low))

        solved = [solver.solve(at(share)) for share in sorted((*_LADDER, self.share))]
        ladder = tuple(plan.peak for plan in solved)
        self.found.update(lowest=low, everything=high, budget=at(self.share), ladder=ladder)
        return Within(at(self.share), lambda graph: costs).choose(graph)


def measure(case: Case) -> Measured:
    """Compile the model, and measure one training step."""
    begin = time.perf_counter()
    known = ZOO[case.model]
    torch._dynamo.reset()
    model = known.build(**(known.dropout if case.dropout else {}))
    batch = known.batch(case.batch_size, case.length)
    within = _ByShare(case.share)
    engine = attach(model, within)
    try:
        # Compiling takes several times as long under a profiler, so this step runs without one.
        _forward(model, batch, case.bf16).backward()
        assert engine.predictor is not None
        predicted = engine.predictor.activations()
        peak = _peak(model, batch, case.bf16)
    finally:
        engine.detach()
    return Measured(case, **within.found, predicted=predicted, peak=peak, seconds=time.perf_counter() - begin)


def _forward(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], bf16: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        loss: torch.Tensor = model(**batch).loss
    return loss


def _peak(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], bf16: bool) -> int:
    """Returns the peak of a step over what is held before, in bytes; only the loss is kept until the backward."""
    model.zero_grad(set_to_none=True)
    highest, stashed, loss = allocated(lambda: _forward(model, batch, bf16))
    backward, _, _ = allocated(loss.backward)
    return max(highest, stashed + backward)


def rows(measured: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """Yields a table row for each model, for each precision, and for all cases."""
    groups = {name: [one for one in measured if one.case.model == name] for name in MODELS}
    groups["all in fp32"] = [one for one in measured if not one.case.bf16]
    groups["all in bf16"] = [one for one in measured if one.case.bf16]
    groups["all"] = list(measured)
    for name, own in groups.items():
        if own:
            yield {
                "model": name,
                "cases": len(own),
                "over budget": sum(one.is_over for one in own),
                "largest excess, bytes": max(one.excess for one in own),
                "largest error of the prediction, bytes": max(abs(one.peak - one.predicted) for one in own),
                "of the budget used, median": f"{statistics.median(one.use for one in own):.1%}",
                "least": f"{min(one.use for one in own):.1%}",
                "peak rises as the budget falls": sum(not one.falls for one in own),
            }


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add the cases that are missing; see budget.py."""
    count = 2 if arguments.quick else arguments.cases
    measured = saved.setdefault("measured", [])
    for case in tqdm(cases(count)[len(measured) :], disable=None):
        measured.append(measure(case).to_dict())
        keep()


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of models."""
    return {"cases": to_markdown(list(rows([Measured.from_dict(one) for one in saved["measured"]])), {})}
