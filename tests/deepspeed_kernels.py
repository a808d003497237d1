import importlib


def leave_out_shared_memory() -> None:
    """Without a kernel that reduces gradients in shared memory, which takes a minute and a half; gloo does so too."""
    importlib.import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
