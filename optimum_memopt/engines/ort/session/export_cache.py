"""Caches exported graphs in a folder, each under a hash of everything that the export depends on.

ONNX Runtime's own cache uses the module's `repr` as key (onnxruntime 1.19.2, _graph_transition_manager.py:843), which
is the same for another LoRA scaling, constant or forward. The dependencies of an export cannot be listed in Python
(attributes, closures, globals, the source of every called function), but tracing resolves all of them into the graph
that the exporter converts. So the key is a hash of that graph: a cache hit still costs the trace, about a quarter of
the export (RoBERTa 12x768: 1.4 of 5.8 CPU-seconds), and never returns another model's graph.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from optimum_memopt.cache_files import entry_bytes, write_entry
from optimum_memopt.engines.ort.compat import internals
from optimum_memopt.errors import reason_of
from optimum_memopt.logs import get_logger

FLAG = "--ort_cache_dir"
# Maximum bytes of an entry, protobuf's limit for a message.
_LARGEST = 2**31


class _CacheHit(Exception):
    """Aborts the export with the content of the cached entry."""


class _NotCacheable(Exception):
    """Raised if the traced graph holds a value that cannot be compared between processes."""


@contextlib.contextmanager
def cached_exports(folder: Path, dependencies: Sequence[str]) -> Iterator[None]:
    """Returns a context in which `torch.onnx.export` into a buffer looks up the graph in a folder, and adds it if
    missing.

    The folder is created with the first entry, and may be shared between processes. The name of an entry contains a
    hash of its content, which detects damaged entries. If the folder cannot be read or written, the export runs
    without the cache, with a warning.

    Args:
        dependencies: versions and symbolics, part of the key besides the traced graph and the arguments of
            `torch.onnx.export`.
    """
    original = torch.onnx.export

    # ORT inspects the parameters of torch.onnx.export.
    @functools.wraps(original)
    def export(model: Any, args: Any, file: Any, **arguments: Any) -> Any:
        key = ""

        def look_up(graph: Any) -> None:
            nonlocal key
            settings = repr(sorted(arguments.items()))
            try:
                key = _hash((*_graph_text(graph), *_tensors(model), settings, *dependencies))
            except _NotCacheable as reason:
                get_logger().info(f"{FLAG}: {reason}, so this graph is exported in each run")
                return
            if (content := _read(folder, key)) is not None:
                raise _CacheHit(content)

        try:
            with internals.observe_traced_graphs(look_up):
                outputs = original(model, args, file, **arguments)
        except _CacheHit as hit:
            file.write(hit.args[0])
            return None
        if key:
            _write(folder, key, file.getvalue())
        return outputs

    with mock.patch.object(torch.onnx, "export", export):
        yield


def _read(folder: Path, key: str) -> bytes | None:
    try:
        for entry in sorted(folder.glob(f"{key}-*.onnx")):
            content = entry_bytes(entry, _LARGEST)
            if content is not None and entry == _entry(folder, key, content):
                get_logger().info(f"{FLAG}: loaded the exported graph from {entry}")
                return content
            get_logger().warning(f"{FLAG}: {entry} is damaged and is replaced")
            entry.unlink(missing_ok=True)
    except OSError as error:
        get_logger().warning(f"{FLAG}: cannot read {folder} ({reason_of(error)}); exporting the model again")
    return None


def _write(folder: Path, key: str, content: bytes) -> None:
    try:
        write_entry(_entry(folder, key, content), content)
    except OSError as error:
        get_logger().warning(
            f"{FLAG}: cannot write into {folder} ({reason_of(error)}); training continues, the exported graph is not "
            "cached"
        )


def _entry(folder: Path, key: str, content: bytes) -> Path:
    return folder / f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.onnx"


def _hash(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode(errors="surrogatepass"))
    return digest.hexdigest()[:32]


def _tensors(module: torch.nn.Module) -> Iterator[str]:
    """Yields for each name in the state dict the first name of the same tensor, after which the graph's input is
    named."""
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        yield f"{name} = {first.setdefault(id(tensor), name)}"


def _graph_text(graph: Any) -> Iterator[str]:
    """Yields a traced graph (`torch.Graph`) as text that is the same in every process.

    Its own `str` has operators, edges, shapes and dtypes, but truncates numbers and omits tensors.
    """
    yield graph.str(False)
    for node in graph.nodes():
        if node.kind() == "prim::PythonOp":
            yield _function_text(node)
        yield node.scopeName()
        for name in node.attributeNames():
            kind = node.kindOf(name)
            value = getattr(node, kind)(name)
            if kind == "g":
                yield from _graph_text(value)
            else:
                yield f"{name}: {kind} = {_value_text(value)}"
        for block in node.blocks():
            yield from _graph_text(block)


def _function_text(node: Any) -> str:
    """Returns the text of ORT's identity function, which ORT adds at each output. Raises _NotCacheable for other
    `torch.autograd.Function`s, which are exported by their memory address."""
    function = getattr(node.pyobj(), "__self__", None)
    if not getattr(function, "__module__", "").startswith("onnxruntime."):
        raise _NotCacheable(f"the model has a torch.autograd.Function ({node.pyname()})")
    return f"{node.pyname()} {node.scalar_args()}"


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | torch.device | torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, dict):
        return f"[{', '.join(f'{key!r}: {_value_text(item)}' for key, item in value.items())}]"
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        elements: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(memoryview(elements)).hexdigest()}"
    raise _NotCacheable(f"the traced graph has a constant of type {type(value).__name__}")
