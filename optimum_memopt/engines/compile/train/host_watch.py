"""Detects a device that waits for Python in the forward, for example if the model is small for its GPU."""

import torch

# The first forwards, which compile, load and autotune kernels, are not watched.
_WARM, _WATCHED = 8, 10
# Maximum number of watched forwards that may end on a busy device: another process may have delayed it once.
_BUSY = 1

FASTER_AS_ONE_GRAPH = (
    f"the GPU waits for Python: at the end of {_WATCHED - _BUSY} of {_WATCHED} forwards all kernels had already run; "
    "with --memory_opt_unit model Python launches them faster, after a longer first step"
)


class HostWatch:
    """Finds out whether Python launches kernels more slowly than the device runs them.

    At the end of a forward, a device that keeps up has nothing left to do. Asking it takes microseconds and waits for
    nothing; it is asked in ten early forwards.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forwards = self._busy = 0

    @property
    def is_over(self) -> bool:
        """True after the last watched forward."""
        return self._forwards >= _WARM + _WATCHED

    @property
    def waits(self) -> bool:
        """True if the device had finished at the end of nearly all watched forwards."""
        return self.is_over and self._busy <= _BUSY

    def end_forward(self) -> None:
        """Count a forward whose kernels have been launched."""
        self._forwards += 1
        if self._forwards > _WARM:
            self._busy += not torch.cuda.current_stream(self._device).query()
