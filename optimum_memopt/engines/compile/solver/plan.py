"""What a training forward saves under a budget. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a forward saves for its backward, on the device or the host.

    Attributes:
        saved: nodes that the forward saves, in order.
        peak: bytes, exact as long as the device waits for no copy too late.
        extra_seconds: of what is recomputed, and of waiting for copies.
        seconds: of forward and backward without both.
        offloaded: nodes of `saved` that wait on the host.
        stall: seconds of `extra_seconds` that the device waits for copies.
        host_bytes: of pinned memory.
        graphs: the plan of each graph, where graph breaks split the forward; `saved` and `offloaded` are theirs.
    """

    saved: tuple[int, ...]
    peak: int
    extra_seconds: float
    seconds: float
    offloaded: tuple[int, ...] = ()
    stall: float = 0.0
    host_bytes: int = 0
    graphs: tuple["Plan", ...] = ()


class Infeasible(Exception):
    """No plan fits.

    Args:
        peak: the lowest that was found, bytes.
        holds: what is held at that moment, largest first: a few words, bytes.
    """

    def __init__(self, peak: int, holds: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(f"no plan fits; the lowest peak is {peak:,} bytes")
        self.peak, self.holds = peak, tuple(holds)
