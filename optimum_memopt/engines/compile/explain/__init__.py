"""Why a training step ran out of memory, from its graphs captured on fake tensors after the fact."""
