"""Trains with re-entrant activation checkpointing, and refuses checkpoints that cannot be exported."""

from optimum_memopt import UnsupportedModelError
from tests.gradients import accumulate, assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import optimize


def checkpointed(name, reentrant=True):
    model = ZOO[name].build()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model


def assert_refused(words, model, **options):
    try:
        optimize(model, **options)
        accumulate(model, [ZOO["llama"].batch()])
    except UnsupportedModelError as error:
        assert words in str(error), error
    else:
        raise AssertionError("trained")


case = ZOO["roberta-classification"]
model = checkpointed("roberta-classification")
engine = optimize(model, ort_allow_autograd_checkpoint=True)
masked = case.batch(3, 7, seed=1)
masked["attention_mask"][:, 4:] = 0
assert_same_step(model, case.build(), case.batch(), masked, case.batch(3, 7, seed=2))
operators = [node.op_type for node in engine.graph.node]
assert operators.count("PythonOp") == operators.count("PythonOpGrad") == 2
assert "Softmax" not in operators  # The layers run in PyTorch.

allowed = {"ort_allow_autograd_checkpoint": True}
assert_refused("is not re-entrant: the export would lose it", checkpointed("llama", reentrant=False), **allowed)
assert_refused("position_embeddings", checkpointed("llama"), **allowed)
