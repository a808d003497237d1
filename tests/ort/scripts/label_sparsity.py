"""Compares the number of rows that ORT leaves out with each sparsity option, and the gradients with plain PyTorch."""

import torch

from tests.gradients import TOLERANCE
from tests.ort.helpers import Tagger, optimize

ids = torch.arange(48).reshape(4, 12)
labels = ids.masked_fill(torch.arange(12) < 8, -100)
gathers = {}
for name, options in {
    "default": {},
    "label": {"ort_label_sparse_optimizer": True},
    "no label": {"ort_label_sparse_optimizer": False},
    "no embedding": {"ort_embedding_sparse_optimizer": False},
    "no compute": {"ort_compute_optimizer": False},
}.items():
    model, plain = Tagger(), Tagger()
    engine = optimize(model, **options)
    for offset in (0, 40):
        batch = (ids + offset, labels + offset * (labels > 0))
        loss, expected = model(*batch), plain(*batch)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    gathers[name] = sum(node.op_type == "ShrunkenGather" for node in engine.graph.node)
    engine.detach()
assert gathers == {"default": 2, "label": 2, "no label": 0, "no embedding": 2, "no compute": 0}, gathers
