"""Keeps exported graphs in a folder, each under a hash of all that its export depends on.

ONNX Runtime's own cache names an export by the module's `repr` (onnxruntime 1.19.2,
_graph_transition_manager.py:843), which is the same for another LoRA scaling, constant or forward. What an export
depends on cannot be listed in Python (attributes, closures, globals, the source of all functions called), but tracing
the model resolves all of it into the graph that the exporter starts from. So the key is that graph: an entry that is
used costs the trace, about a quarter of the export (RoBERTa 12x768: 1.4 of 5.8 CPU-seconds), and is never another
model's.
"""

import contextlib
import functools
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from optimum_memopt.engines.ort import compat
from optimum_memopt.logs import get_logger

FLAG = "--ort_cache_dir"


class _Found(Exception):
    """Leaves the exporter as soon as the key is known and its entry read."""

    def __init__(self, content: bytes) -> None:
        self.content = content


class _Unrepresentable(Exception):
    """Something in the traced graph has no value that another process could compare."""


class ExportCache:
    """Exported graphs in `folder`, which is made when the first one is written.

    An entry is named after its key and its content, so that a damaged one is noticed. A folder that cannot be read or
    written costs the cache, with a warning, and never the export.

    Args:
        folder: may be shared between processes.
        others: what the export depends on beside the traced graph and the arguments of `torch.onnx.export`: versions,
            symbolics.
    """

    def __init__(self, folder: str, others: Sequence[str]) -> None:
        self._folder = Path(folder)
        self._others = tuple(others)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Lets `torch.onnx.export` into a buffer take what is in the cache and put into it what is not."""
        original = torch.onnx.export

        # ORT asks for the parameters of torch.onnx.export by name.
        @functools.wraps(original)
        def export(model: Any, args: Any, file: Any, **arguments: Any) -> Any:
            key = ""

            def look_up(graph: Any) -> None:
                nonlocal key
                try:
                    key = _hashed(
                        (*_described(graph), *_tensors(model), repr(sorted(arguments.items())), *self._others)
                    )
                except _Unrepresentable as reason:
                    get_logger().info(f"{FLAG}: {reason}, so this graph is exported in each run")
                    return
                content = self._read(key)
                if content is not None:
                    raise _Found(content)

            try:
                with compat.traced_graphs_shown(look_up):
                    outputs = original(model, args, file, **arguments)
            except _Found as found:
                file.write(found.content)
                return None
            if key:
                self._write(key, file.getvalue())
            return outputs

        with compat.replaced(torch.onnx, "export", export):
            yield

    def _read(self, key: str) -> bytes | None:
        try:
            for entry in sorted(self._folder.glob(f"{key}-*.onnx")):
                content = entry.read_bytes()
                if entry == self._entry(key, content):
                    get_logger().info(f"{FLAG}: took the exported graph from {entry}")
                    return content
                get_logger().warning(f"{FLAG}: {entry} is damaged and is replaced")
                entry.unlink(missing_ok=True)
        except OSError as error:
            get_logger().warning(f"{FLAG}: cannot read {self._folder} ({_reason(error)}); exporting the model anew")
        return None

    def _write(self, key: str, content: bytes) -> None:
        entry = self._entry(key, content)
        # Not tempfile: entries of a shared folder have the permissions that the umask gives.
        part = entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(content)
                part.replace(entry)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            get_logger().warning(
                f"{FLAG}: cannot write into {self._folder} ({_reason(error)}); training goes on, the exported graph "
                "is not kept"
            )

    def _entry(self, key: str, content: bytes) -> Path:
        return self._folder / f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.onnx"


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _hashed(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode(errors="surrogatepass"))
    return digest.hexdigest()[:32]


def _tensors(module: torch.nn.Module) -> Iterator[str]:
    """Names, and which of them are one tensor: the graph's inputs are called after the first."""
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        yield f"{name} = {first.setdefault(id(tensor), name)}"


def _described(graph: Any) -> Iterator[str]:
    """A traced graph (`torch.Graph`) in text that is the same in each process.

    Its own text has operators, edges, shapes and dtypes, but shortens numbers and leaves tensors out.

    Raises:
        _Unrepresentable: see there.
    """
    yield graph.str(False)
    for node in graph.nodes():
        if node.kind() == "prim::PythonOp":
            yield _described_function(node)
        yield node.scopeName()
        for name in node.attributeNames():
            kind = node.kindOf(name)
            value = getattr(node, kind)(name)
            if kind == "g":
                yield from _described(value)
            else:
                yield f"{name}: {kind} = {_described_value(value)}"
        for block in node.blocks():
            yield from _described(block)


def _described_function(node: Any) -> str:
    """ORT puts an identity of its own at each output; other functions are exported by their address in memory."""
    function = getattr(node.pyobj(), "__self__", None)
    if not getattr(function, "__module__", "").startswith("onnxruntime."):
        raise _Unrepresentable(f"the model has a torch.autograd.Function ({node.pyname()})")
    return f"{node.pyname()} {node.scalar_args()}"


def _described_value(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | torch.device | torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described_value, value))}]"
    if isinstance(value, dict):
        return f"[{', '.join(f'{key!r}: {_described_value(item)}' for key, item in value.items())}]"
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        elements = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(elements).hexdigest()}"
    raise _Unrepresentable(f"the traced graph has a constant of type {type(value).__name__}")
