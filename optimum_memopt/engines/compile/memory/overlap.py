"""How long copies between a device and the host take room on the device, beside what it computes. Pure.

Both directions are one problem: a reload is an offload with time running backwards.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Copy(NamedTuple):
    """A tensor on its way to the host.

    Attributes:
        after: index of the operator behind which the copy may begin.
        bytes: on the device until it is complete.
    """

    after: int
    bytes: int


@dataclass(frozen=True)
class Overlap:
    """When the device waits for each copy.

    Attributes:
        until: for each copy the index of the operator before which the device waits for it; the number of operators
            where it waits behind the last.
        stall: seconds that it waits in all.
    """

    until: tuple[int, ...]
    stall: float


def overlap(
    held: Sequence[int], seconds: Sequence[float], copies: Sequence[Copy], limit: int, bandwidth: float
) -> Overlap:
    """Let each copy take its time beside the operators behind it, one copy after the other.

    The device waits for a copy when it is complete, and earlier where the operator at hand would pass the limit.

    Args:
        held: bytes while each operator runs, of a copied tensor up to the operator `Copy.after` only.
        seconds: of each operator.
        copies: in the order in which they may begin.
        limit: bytes that copies under way must not take `held` beyond.
        bandwidth: bytes a second.
    """
    until = [len(held)] * len(copies)
    under_way: deque[tuple[float, int]] = deque()
    now = link_free = stall = 0.0
    in_flight = next_copy = 0
    for operator, size in enumerate(held):
        while under_way and (under_way[0][0] <= now or size + in_flight > limit):
            end, number = under_way.popleft()
            stall += max(0.0, end - now)
            now = max(now, end)
            in_flight -= copies[number].bytes
            until[number] = operator
        now += seconds[operator]
        while next_copy < len(copies) and copies[next_copy].after == operator:
            link_free = max(link_free, now) + copies[next_copy].bytes / bandwidth
            under_way.append((link_free, next_copy))
            in_flight += copies[next_copy].bytes
            next_copy += 1
    # Behind the last operator the device waits for all.
    stall += max(0.0, link_free - now) if under_way else 0.0
    return Overlap(tuple(until), stall)
