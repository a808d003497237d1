"""Makes accelerate shard a model by FSDP2 on CPUs, which it otherwise does only on accelerators (1.15, `state.py`).

accelerators.py SCRIPT …    runs a script with this patch
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


@contextlib.contextmanager
def cpus_as_accelerators() -> Iterator[None]:
    own = AcceleratorState.__init__

    def init(state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        own(state, *args, **kwargs)

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    with cpus_as_accelerators():
        runpy.run_path(sys.argv[0], run_name="__main__")
