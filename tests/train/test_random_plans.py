"""Random combinations of rows, strategies and counts: the table is right, and the step is plain PyTorch's, bitwise if
nothing is compressed."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.plans.grammar import ALL, Strategy, parse
from tests.compiled import Run, run
from tests.gradients import Batch, Gradients, accumulate, assert_bitwise_same
from tests.model_zoo import ZOO
from tests.rotation import nightly
from tests.train.test_compress import ROUNDING, error

MODELS = ("roberta-classification", "deberta-v2-mlm", "gpt2")
LENGTHS = {"batch_size": 8, "length": 24}
# No shrinking, which would run for many minutes; configs are short anyway.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@dataclass(frozen=True, repr=False)
class Subject:
    """A model without dropout, a batch, and its steps in plain PyTorch and under the engine with everything saved."""

    model: torch.nn.Module
    batch: Batch
    expected: tuple[torch.Tensor, Gradients]
    kept: Run
    # By cluster id and strategy: how often it can be applied.
    rows: dict[str, dict[Strategy, int]]


@pytest.fixture(scope="module", params=nightly(MODELS, but=["roberta-classification"]))
def subject(request: pytest.FixtureRequest) -> Subject:
    case = ZOO[request.param]
    model = case.build()
    # The engine does this itself: caches change the layout of keys and values, and so the last bits of products.
    batch = without_key_value_cache(model, (), case.batch(**LENGTHS))
    expected = accumulate(model, [batch])
    candidates = run(model, "", batch).split.graph.candidates
    rows: dict[str, dict[Strategy, int]] = {}
    for candidate in candidates:
        counts = rows.setdefault(candidate.cluster_id, {})
        counts[candidate.strategy] = counts.get(candidate.strategy, 0) + 1
    # A plan with only disabled rows is a plan, so torch's own partition is not used.
    kept = run(model, f"{next(iter(rows))}:1:0", batch)
    return Subject(model, batch, expected, kept, rows)


def configs(subject: Subject) -> st.SearchStrategy[str]:
    """Returns a strategy of configs: some rows, each with one strategy and a count from zero to one too many."""

    def request(cluster_id: str) -> st.SearchStrategy[str]:
        ways = [st.just(f"{cluster_id}:0:{ALL}")]
        for strategy, frequency in subject.rows[cluster_id].items():
            counts = st.sampled_from([ALL, *range(frequency + 2)])
            ways.append(counts.map(f"{cluster_id}:{int(strategy)}:{{}}".format))
        return st.one_of(*ways)

    ids = st.lists(st.sampled_from(sorted(subject.rows)), min_size=3, unique=True)
    return ids.flatmap(lambda some: st.tuples(*map(request, some))).map(",".join)


def check(subject: Subject, config: str) -> None:
    ours = run(subject.model, config, subject.batch)
    if any(":4:" in row.config for row in ours.table.enabled):
        assert torch.equal(ours.step[0], subject.expected[0])
        assert error(ours.step[1], subject.expected[1]) < ROUNDING
    else:
        assert_bitwise_same(ours.step, subject.expected)
    ours.split.check(ours.table)
    asked = Counter()
    for request in parse(config).requests:
        if request.is_on:
            frequency = subject.rows[request.cluster_id][request.strategy]
            on = f"{request.cluster_id}:{int(request.strategy)}:{ALL}"
            asked[on] = frequency if request.count == ALL else min(request.count, frequency)
    assert {row.config: row.applied_count for row in ours.table.enabled} == asked
    saved = ours.split.graph.prediction.saved_bytes
    assert saved <= subject.kept.split.graph.prediction.saved_bytes
    # On a CPU, offload saves nothing: it copies within the same memory.
    recomputed = sum(row.applied_saving_bytes for row in ours.table.enabled)
    assert saved == subject.kept.split.graph.prediction.saved_bytes - recomputed


@settings(max_examples=2, phases=PHASES, derandomize=True)
@given(data=st.data())
def test_any_plan(subject: Subject, data: st.DataObject) -> None:
    check(subject, data.draw(configs(subject)))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=100, phases=PHASES)
@given(data=st.data())
def test_many_plans(subject: Subject, data: st.DataObject) -> None:
    check(subject, data.draw(configs(subject)))


def test_all_rows_at_once(subject: Subject) -> None:
    """With all rows at once, everything that can be is recomputed, and the rest is offloaded if possible."""
    ways = {cluster_id: min(found) for cluster_id, found in subject.rows.items()}
    check(subject, ",".join(f"{cluster_id}:{int(strategy)}:{ALL}" for cluster_id, strategy in ways.items()))
