"""Methods handed to what outlives their object, such as a backend that torch keeps until the process ends."""

import weakref
from collections.abc import Callable
from typing import Any


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, called while its object is alive."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = held()
        assert alive is not None
        return alive(*args)

    return call
