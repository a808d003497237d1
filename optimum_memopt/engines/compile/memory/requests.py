"""What a forward and its backward request of an allocator and give back, in order. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from optimum_memopt.engines.compile.memory.liveness import Schedule


class Request(NamedTuple):
    """Memory that is asked for, or given back.

    Attributes:
        storage: its name, unique while it is held.
        bytes: that are asked for; 0: it is given back.
    """

    storage: str
    bytes: int


def requests_of(
    graph: Schedule, sizes: Sequence[int], prefix: str, known: Mapping[str, str] | None = None
) -> Iterator[Request]:
    """Of running a graph in its order.

    Args:
        graph: what each operator allocates and frees.
        sizes: bytes by the indices of `graph`.
        prefix: of the names of storages that the graph allocates.
        known: names of storages from before, by the name of the node that is given them.
    """
    names = [(known or {}).get(root, f"{prefix}{root}") for root in graph.roots]
    for allocates, workspace, frees in graph.operators:
        for storage in allocates:
            if size := sizes[graph.storages[storage]]:
                yield Request(names[storage], size)
        if sizes[workspace]:
            yield Request(f"{prefix} workspace", sizes[workspace])
            yield Request(f"{prefix} workspace", 0)
        for storage in frees:
            yield Request(names[storage], 0)
