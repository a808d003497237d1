import importlib


def leave_out_shared_memory() -> None:
    """Disable the shared-memory kernel that reduces gradients: it takes a minute and a half; gloo does the same."""
    importlib.import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
