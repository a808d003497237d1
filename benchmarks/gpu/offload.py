"""Offload with delayed copies, for the part `right` of gpu/acceptance.py."""

import contextlib
from collections.abc import Iterator

import torch
from gpu.checks import Figure, Setting, within
from gpu.steps import SMALL, TINY, batch_of, build, gradients, largest_error, offload_config, planned

# Bytes of a copy that delays the engine's copies, and cycles of a delay of the computation; both take milliseconds.
_BLOCK = 256 * 2**20
_CYCLES = 20_000_000


def delayed_copies(setting: Setting) -> Iterator[Figure]:
    """Check the gradients of many steps with delayed copies: a missing wait would show as wrong data."""
    shape, rounds = (TINY, 4) if setting.quick else (SMALL, 100)
    batch = batch_of(shape)
    for compiler in ("aot_eager", "inductor"):
        trained = build("roberta", shape)
        engine = planned(trained, compiler=compiler, loss="plain")
        expected = gradients(trained, batch)
        table = engine.plans()
        config = offload_config(table.plans if table is not None else ())
        engine.detach()
        engine = planned(trained, compiler=compiler, loss="plain", config=config)
        gradients(trained, batch)
        worst, is_behind = 0.0, []
        for number in range(rounds):
            with _busy_copies(number, is_behind):
                error = largest_error(gradients(trained, batch), expected)
            worst = max(worst, error) if error == error else error
        limit = 1e-6 if compiler == "aot_eager" else 1e-5
        yield within(f"{compiler}, worst of {rounds} rounds", worst, limit)
        late = sum(is_behind) / len(is_behind)
        yield Figure(
            f"{compiler}, rounds that began before the copies", setting.quick or late > 0.5, f"{late:.0%}", "50%"
        )
        engine.detach()


@contextlib.contextmanager
def _busy_copies(number: int, is_behind: list[bool]) -> Iterator[None]:
    """Delay the engine's copies by large ones in both directions on other streams; in odd rounds also delay the
    computation.

    Args:
        number: number of the round.
        is_behind: gets whether the large copies were still in flight when the step began.
    """
    on_device = torch.empty(_BLOCK, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for stream, (target, source) in zip(streams, ((on_host, on_device), (on_device, on_host)), strict=True):
        with torch.cuda.stream(stream):
            for _ in range(2):
                target.copy_(source, non_blocking=True)
            end = stream.record_event()
    if number % 2:
        torch.cuda._sleep(_CYCLES)
    is_behind.append(not end.query())
    try:
        yield
    finally:
        torch.cuda.synchronize()
