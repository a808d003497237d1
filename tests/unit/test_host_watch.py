from collections.abc import Iterable

import pytest
import torch

from optimum_memopt.engines.compile.train import host_watch
from optimum_memopt.engines.compile.train.host_watch import HostWatch


class Stream:
    """A stream that has finished its work when it is asked, or not."""

    def __init__(self, finished: Iterable[bool]):
        self.answers = iter(finished)

    def query(self) -> bool:
        return next(self.answers)


@pytest.mark.parametrize(("finished", "waits"), [(10, True), (9, True), (8, False), (0, False)])
def test_a_device_waits_if_it_has_finished_at_the_end_of_forwards(
    monkeypatch: pytest.MonkeyPatch, finished: int, waits: bool
) -> None:
    stream = Stream([True] * finished + [False] * (10 - finished))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    watch = HostWatch(torch.device("cuda"))
    for _ in range(host_watch._WARM + host_watch._WATCHED):
        assert not watch.is_over and not watch.waits
        watch.end_forward()
    assert watch.is_over and watch.waits == waits
