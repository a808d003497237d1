"""What one rank computes for all of them.

By the key-value store of the process group, not by a collective operation: that every rank would have to reach, also
where only one of them compiles again.
"""

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

# Seconds between two looks into the store.
_LOOK = 0.05


def computed_once(store: "Store", name: str, compute: Callable[[], str], wait: float) -> str:
    """What the first rank that asks for `name` computes, and all others take from it.

    Args:
        store: of the process group.
        name: all that the result depends on.
        compute: called on the first rank; on another one, if the first has failed or has not answered in time.
        wait: seconds that another rank waits.
    """
    key = f"optimum_memopt/{hashlib.sha256(name.encode()).hexdigest()}"
    try:
        is_first = store.add(f"{key}/asked", 1) == 1
    # Not every store counts: torch's backend `fake` has none that does.
    except RuntimeError:
        return compute()
    if is_first:
        found = ""
        try:
            found = compute()
        finally:
            store.set(key, found)
        return found
    end = time.monotonic() + wait
    while not store.check([key]):
        if time.monotonic() > end:
            return compute()
        time.sleep(_LOOK)
    return store.get(key).decode() or compute()
