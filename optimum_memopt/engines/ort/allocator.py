"""An arena for ONNX Runtime's CPU tensors that is frugal, in place of its own."""

import functools


@functools.cache
def register_arena() -> None:
    """Give this process' ONNX Runtime an arena for sessions that ask for one (`session.use_env_allocators`).

    ORT's own grows by powers of two and hands out blocks with up to 128 MiB to spare; this one grows by what is asked
    for and spares 1 MiB: the same speed at a lower peak (docs/ort.md). An arena that the user has registered stays.
    """
    import onnxruntime

    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    info = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    frugal = {
        "max_mem": 0,
        "arena_extend_strategy": 1,
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": 1 << 20,
    }
    try:
        onnxruntime.create_and_register_allocator(info, onnxruntime.OrtArenaCfg(frugal))
    except RuntimeError as error:
        if "already been registered" not in str(error):
            raise
