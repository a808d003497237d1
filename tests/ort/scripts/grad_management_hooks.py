"""Compares gradients and hooks with plain PyTorch, also after parameters are frozen."""

import torch

from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import optimize

torch.set_num_threads(1)


def managed(model, **options):
    return optimize(model, **{"ort_mem_efficient_grad_mgmt": True, **options})


def unused(model):
    return sum(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def with_hooks(model):
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(("gradient", name)))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: fired.append(("accumulated", name)))
    return fired


for name, options in (("roberta-mlm", {}), ("gpt2", {"memory_opt_level": 1})):
    case = ZOO[name]
    model, plain = case.build(), case.build()
    ours, expected = with_hooks(model), with_hooks(plain)
    engine = managed(model, **options)
    for step in range(3):
        if step == 2:  # Frozen during training.
            for trained in (model, plain):
                for parameter in list(trained.parameters())[:4]:
                    parameter.requires_grad_(False)
        assert_same_step(model, plain, case.batch(3 + step, 8, seed=step), case.batch(2, 5, seed=10 + step))
        assert ours and sorted(ours) == sorted(expected)
        ours.clear()
        expected.clear()
    retrieved = sum(node.op_type == "PythonOp" for node in engine.graph.node)
    assert retrieved == sum(parameter.requires_grad for parameter in model.parameters()) - unused(model), retrieved
    assert bool(engine.plans().enabled) is bool(options)
    padding = getattr(model, "roberta", None) and model.roberta.embeddings.position_embeddings
    if padding:
        assert padding.weight.grad is None or not padding.weight.grad[padding.padding_idx].any()
    engine.detach()

# The next model in the process is not managed.
model = ZOO["roberta-mlm"].build()
engine = managed(model, ort_mem_efficient_grad_mgmt=False)
assert_same_step(model, ZOO["roberta-mlm"].build(), ZOO["roberta-mlm"].batch())
assert not [node for node in engine.graph.node if node.op_type == "PythonOp"]
