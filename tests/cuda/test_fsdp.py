"""FSDP2 on a device, with a fake process group that exchanges nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.cuda.steps import training


@pytest.fixture(params=[1, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", [0, 1])
def test_requested_bytes_are_the_prediction(ranks: int, level: int) -> None:
    trained = training("llama", "bf16", memory_opt_level=level, memory_opt_unit="layer")
    for layer in trained.model.model.layers:
        fully_shard(layer)
    fully_shard(trained.model)
    trained.optimizer = torch.optim.AdamW(trained.model.parameters(), fused=True)
    for _ in range(3):
        measured = trained.step()
    footprint = trained.engine.predictor.footprint(optimizer=trained.optimizer)
    assert measured.requested == pytest.approx(footprint.peak, rel=0.01)
