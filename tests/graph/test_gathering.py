"""What ZeRO 3 gathers and reduces around modules, by rules; `train/test_zero3_memory.py` compares with DeepSpeed."""

import math

import pytest
import torch

from optimum_memopt.engines.compile.sharding.gathering import Gathering
from optimum_memopt.engines.torch_compat.zero3 import PartitionedParameter, Partitioning

ELEMENTS = 16


def chain(count: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(count)))


def partitioned(model: torch.nn.Module, persistent: str = "none", **numbers: int) -> Partitioning:
    names = dict(model.named_parameters())
    parameters = {
        name: PartitionedParameter(
            order, parameter.shape, math.ceil(parameter.numel() / 2), parameter.dtype, name == persistent, order
        )
        for order, (name, parameter) in enumerate(names.items())
    }
    limits = {"prefetched": 0, "reuse": 0, "live": 10**9, "bucket": 10**9, **numbers}
    return Partitioning(
        2, parameters, **limits, computed=torch.float32, reduced=torch.float32, accumulated=torch.float32
    )


def there(model: torch.nn.Module) -> list[int]:
    return [number for number, layer in enumerate(model) if layer.weight.numel() == ELEMENTS]


def passed(model: torch.nn.Module, gathering: Gathering) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the modules whose parameters are present while, and after, each runs, in a forward and its backward."""
    during, behind = [], []
    gathering.begin()
    for in_backward, layers in ((False, list(model)), (True, list(reversed(model)))):
        for layer in layers:
            gathering.fetch(layer, in_backward)
            during.append(there(model))
            gathering.release(layer, in_backward)
            behind.append(there(model))
    gathering.end()
    return during, behind


def second_step(model: torch.nn.Module, **numbers: object) -> tuple[list[list[int]], list[list[int]]]:
    spec = partitioned(model, **numbers)
    first = Gathering(model, spec, [], None)
    passed(model, first)
    return passed(model, Gathering(model, spec, [], first.order))


def test_the_first_step_has_one_module_at_a_time() -> None:
    model = chain(3)
    during, behind = passed(model, Gathering(model, partitioned(model, prefetched=100, reuse=1000), [], None))
    assert during == [[0], [1], [2], [2], [1], [0]] and not any(behind)


@pytest.mark.parametrize(
    "numbers, during, behind",
    [
        ({}, [[0], [1], [2], [2], [1], [0]], [[]] * 6),
        # Only the last module's next use, in its own backward, is within the distance.
        ({"reuse": 1}, [[0], [1], [2], [2], [1], [0]], [[], [], [2], [], [], []]),
        ({"reuse": 1000}, [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1], [0]], [[0], [0, 1], [0, 1, 2], [0, 1], [0], []]),
        # A single parameter's data is a view of the gathered buffer, so it is present at once.
        ({"prefetched": 1}, [[0, 1], [1, 2], [1, 2], [0, 1, 2], [0, 1], [0]], [[1], [2], [1], [0, 1], [0], []]),
        ({"prefetched": 1, "live": ELEMENTS}, [[0], [1], [2], [2], [1], [0]], [[]] * 6),
    ],
)
def test_later_steps_gather_ahead_and_keep_what_is_used_again(
    numbers: dict[str, int], during: list[list[int]], behind: list[list[int]]
) -> None:
    assert second_step(chain(3), **numbers) == (during, behind)


def test_what_is_persistent_stays() -> None:
    during, behind = second_step(chain(3), persistent="1.weight")
    assert during == [[0, 1], [1], [1, 2], [1, 2], [1], [0, 1]]
    assert behind == [[1]] * 6


def test_a_leaf_is_gathered_with_what_is_in_it() -> None:
    model = torch.nn.Sequential(chain(2), chain(2))
    gathering = Gathering(model, partitioned(model), list(model), None)
    gathering.begin()
    gathering.fetch(model[0])
    assert there(model[0]) == [0, 1] and there(model[1]) == []
    gathering.release(model[0])
    assert there(model[0]) == []
