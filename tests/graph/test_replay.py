import torch

from optimum_memopt.engines.compile.costs.times import replayed
from tests.captured import Captured


def test_a_graph_is_run_for_each_batch(roberta: Captured) -> None:
    rows = [symbol for symbol, name in roberta.names.items() if name.endswith("dim0")]
    few, many = ({**roberta.sizes, **dict.fromkeys(rows, count)} for count in (2, 64))
    before = torch.get_rng_state()
    found = replayed(roberta.graph, [few, many])
    assert found is not None and 0 < found[0] < found[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_graph_that_does_not_run_takes_nothing(roberta: Captured) -> None:
    assert replayed(roberta.graph, [dict.fromkeys(roberta.sizes, -1)]) is None
