import pytest

from tests.captured import Captured, capture
from tests.compiled import DROPOUT, GPT2_DROPOUT
from tests.model_zoo import ZOO


def _of(name: str, **changes: object) -> Captured:
    case = ZOO[name]
    return capture(case.build(**changes).forward, **case.batch())


@pytest.fixture(scope="session")
def roberta() -> Captured:
    """Returns a RoBERTa of two layers, with dropout everywhere."""
    return _of("roberta-classification", **DROPOUT)


@pytest.fixture(scope="session")
def roberta_of_another_batch() -> Captured:
    """Returns the same model with 7 rows of 29 tokens in the first batch."""
    case = ZOO["roberta-classification"]
    return capture(case.build(**DROPOUT).forward, **case.batch(7, 29))


@pytest.fixture(scope="session")
def gpt2() -> Captured:
    case = ZOO["gpt2"]
    model = case.build(**GPT2_DROPOUT, use_cache=False)
    # Without a loss name the model warns, which is a graph break (see `TraceFixes`).
    model.loss_type = "ForCausalLM"
    return capture(model.forward, **case.batch())


@pytest.fixture(scope="session")
def albert() -> Captured:
    """Returns an ALBERT, whose one layer is called twice."""
    return _of("albert-mlm")
