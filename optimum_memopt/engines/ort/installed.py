"""Which ONNX Runtime is installed, found without importing it."""

from optimum_memopt.installed import installed_version

DISTRIBUTIONS = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime-training-rocm")


def missing() -> str:
    """Why this engine cannot work here and how to get it; empty when it can."""
    if installed_version(DISTRIBUTIONS) is None:
        return "onnxruntime-training is not installed; pip install 'optimum-memopt[ort]' (Python 3.12 or older)"
    if clash := installed_version(("onnxruntime", "onnxruntime-gpu")):
        return (
            f"the package {clash[0]} overwrites onnxruntime-training, both are imported as onnxruntime; "
            f"pip uninstall {clash[0]} and reinstall onnxruntime-training"
        )
    return ""
