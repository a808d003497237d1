"""What a picture of a timeline is drawn from: layers as spans, and few enough columns. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from optimum_memopt.engines.step_timeline import StepTimeline


@dataclass(frozen=True)
class Span:
    """Operators that follow one another.

    Attributes:
        name: path of their layer.
        begin: index of the first.
        end: index behind the last.
    """

    name: str
    begin: int
    end: int


def layer_spans(layers: Sequence[str], border: int | None = None) -> list[Span]:
    """Operators of one layer; those of none within a layer count as its own.

    Args:
        layers: of each operator, empty outside of all.
        border: no span goes beyond this operator.
    """
    spans: list[Span] = []
    for index, layer in enumerate(layers):
        if not layer:
            continue
        is_behind = border is not None and spans and spans[-1].begin < border <= index
        if spans and spans[-1].name == layer and not is_behind:
            spans[-1] = Span(layer, spans[-1].begin, index + 1)
        else:
            spans.append(Span(layer, index, index + 1))
    return spans


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Layers by what tells them apart: their numbers where those differ."""
    numbers = {path: path.rpartition(".")[2] for path in paths}
    return numbers if len(set(numbers.values())) == len(set(paths)) else {path: path for path in paths}


def columns(total: Sequence[int], begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Spans of operators from `begin` to `end`, `most` at the most: the first of each, and the one that holds most."""
    count = min(most, end - begin)
    edges = [begin + (end - begin) * number // count for number in range(count + 1)] if count else []
    return [(low, max(range(low, high), key=total.__getitem__)) for low, high in itertools.pairwise(edges)]


def columns_of(timeline: StepTimeline, most: int) -> list[tuple[int, int]]:
    """`columns` of the forward and the backward, as many as fit; the highest of the timeline is one of them."""
    last = timeline.optimizer_at
    of_forward = max(1, round(most * timeline.backward_at / max(1, last)))
    forward = columns(timeline.total, 0, timeline.backward_at, of_forward)
    return forward + columns(timeline.total, timeline.backward_at, last, max(1, most - len(forward)))
