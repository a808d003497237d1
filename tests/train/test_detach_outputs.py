"""Where only the loss gets a gradient, the logits have none, and take no memory for one."""

import copy

import pytest
import torch

from optimum_memopt import MemOptError
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.loss.decide import refusing_gradients
from optimum_memopt.engines.compile.train.engine import CompileEngine
from tests.gradients import Batch, assert_bitwise_same_step
from tests.model_zoo import ZOO
from tests.rotation import nightly

VOCABULARY = 999


def attached(model: torch.nn.Module, loss_only: bool) -> CompileEngine:
    engine = CompileEngine(Selection(level=1), compiler="aot_eager", loss="plain")
    engine.outputs_read_by = lambda: "" if loss_only else "a test"
    engine.attach(model)
    return engine


@pytest.mark.parametrize(
    ("name", "return_dict"),
    nightly([("roberta-mlm", True), ("roberta-mlm", False), ("gpt2", True)], but=[("gpt2", True)]),
)
def test_the_same_step_in_less_memory(name, return_dict):
    case = ZOO[name]
    model = case.build("eager", **case.one_layer)
    model.resize_token_embeddings(VOCABULARY)
    model.config.return_dict = return_dict
    # With caches PyTorch adds some gradients in another order.
    model.config.use_cache = False
    plain, all_outputs = copy.deepcopy(model), copy.deepcopy(model)
    with_all, alone = attached(all_outputs, False), attached(model, True)
    batch: Batch = case.batch(4, 12)

    outputs = model(**batch)
    if return_dict:
        assert type(outputs) is type(plain(**batch))
    loss, logits = outputs[:2]
    assert loss.requires_grad and logits.grad_fn is None
    with pytest.raises(MemOptError, match="to the model's output '(logits|1)'.*compute_loss_func"):
        (loss + logits.square().sum()).backward()
    assert all_outputs(**batch)[1].requires_grad
    peaks = [engine.predictor.footprint().activations for engine in (with_all, alone)]
    assert peaks[0] - peaks[1] >= 4 * 12 * VOCABULARY * 4, "a gradient of the logits' size less"
    if return_dict:
        assert_bitwise_same_step(model, plain, batch, case.batch(3, 7, seed=1))


class Sink(torch.autograd.Function):
    """As DistributedDataParallel wraps a module's outputs: a gradient that nobody computed stays None."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def test_outputs_that_pass_through_a_wrapper_unread_are_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    outputs = refusing_gradients({"loss": (2 * weight).sum(), "logits": torch.ones(2, 3)})
    loss, _ = Sink.apply(outputs["loss"], outputs["logits"])
    loss.backward()
    assert weight.grad.tolist() == [2, 2, 2]
    with pytest.raises(MemOptError, match="a gradient flowed back to the model's output 'logits'"):
        Sink.apply(outputs["logits"])[0].sum().backward()
