"""Every option of ORTModule, typed: the `--ort_…` flags. Importing this imports nothing of onnxruntime."""

from dataclasses import dataclass, field
from pathlib import Path

from optimum_memopt.errors import MemOptError


@dataclass
class OrtOptions:
    """How ORTModule runs the model.

    Raises:
        MemOptError: from `check_ort`.
    """

    ort_fallback: bool = field(
        default=True,
        metadata={
            "help": "Train with plain PyTorch, and say so, when ONNX Runtime cannot train the model; false: stop."
        },
    )
    ort_arena: bool = field(
        default=False,
        metadata={
            "help": "Let ONNX Runtime keep freed CPU memory in its arena: faster steps at up to a tenth more peak, "
            "and what a plan saves is not given back to the rest of the process."
        },
    )
    ort_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Keep exported graphs here and skip the export when the same model runs again."},
    )
    ort_save_onnx: str | None = field(
        default=None, metadata={"help": "Write the exported, optimized and executed ONNX graphs into this folder."}
    )
    ort_opset: int | None = field(
        default=None, metadata={"help": "ONNX opset of the export; ONNX Runtime's default is 17."}
    )

    def check_ort(self) -> None:
        """Find what is wrong before a model or data is loaded.

        Raises:
            MemOptError: one line that names the option and what is allowed.
        """
        if self.ort_opset is not None and not 12 <= self.ort_opset <= 20:
            raise MemOptError(f"--ort_opset {self.ort_opset}: ONNX Runtime 1.19 trains graphs of opset 12 to 20")
        if self.ort_save_onnx is not None and not Path(self.ort_save_onnx).is_dir():
            raise MemOptError(f"--ort_save_onnx {self.ort_save_onnx}: no such folder; make it first")
