"""The arena that `--ort_arena` gives ONNX Runtime: right gradients, one registration for many engines."""

import torch

import optimum_memopt
from tests.gradients import accumulate, wrong_gradients
from tests.model_zoo import ZOO


def batch(case):
    return case.make_batch(4, 24, torch.Generator().manual_seed(0))


def test_gradients_are_the_plain_ones_in_two_engines_of_one_process():
    for level in (0, 1):
        case = ZOO["roberta-mlm"]
        expected_loss, expected = accumulate(case.build(), [batch(case)])
        model = case.build()
        engine = optimum_memopt.optimize(model, ort_arena=True, ort_fallback=False, memory_opt_level=level)
        loss, gradients = accumulate(model, [batch(case)])
        assert not wrong_gradients(gradients, expected)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        engine.detach()


def test_an_arena_that_the_user_registered_stays():
    from optimum_memopt.engines.ort.compat import ortmodule
    from optimum_memopt.engines.ort.session import session

    ortmodule.load()
    session.register_arena()
    # To ORT a second registration is an error, whoever made the first.
    session.register_arena.cache_clear()
    session.register_arena()
