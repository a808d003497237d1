"""Fast replacements of torch functions that run in each step give the same results as torch's."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils import _pytree
from transformers.modeling_outputs import BaseModelOutput

from optimum_memopt.engines.torch_compat import dynamo, traced_sizes

Pair = namedtuple("Pair", ["one", "other"])
A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    "values",
    [
        A,
        None,
        (A, None, [B, (C, 3)]),
        ((A,), {"mask": None, "cos": (B, C), "scale": 2.0}),
        {"b": A, "a": [B]},
        OrderedDict(b=A, a=[B, {"c": C}]),
        [Pair(A, (B, None)), "text", True],
        BaseModelOutput(last_hidden_state=A, hidden_states=(B, C)),
        (object(), slice(0, 1), torch.Size([2, 3]), {A.dtype}),
    ],
)
def test_leaves_are_those_of_torch(values: object) -> None:
    expected = _pytree.tree_leaves(values)
    found = dynamo.tree_leaves(values)
    assert len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dims", [(), (0,), (1, 2)])
def test_marks_are_those_of_torch(dims: tuple[int, ...]) -> None:
    ours, others, theirs = (torch.ones(2, 3, 4) for _ in range(3))
    with traced_sizes.StaticSizes([(ours, dims), (others, dims)]):
        torch._dynamo.mark_static(theirs, list(dims))
        assert vars(ours) == vars(others) == vars(theirs)
        # The tensors do not share their marks.
        with traced_sizes.StaticSizes([(ours, [0])]):
            torch._dynamo.mark_static(theirs, [0])
            assert vars(ours) == vars(theirs)
            if dims and dims != (0,):
                assert vars(ours) != vars(others)
    assert not vars(ours) and not vars(others)
