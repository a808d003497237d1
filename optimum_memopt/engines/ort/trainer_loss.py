"""Which Trainers `--ort_module_with_loss` goes with."""

from transformers import Trainer

from optimum_memopt.errors import MemOptError


def check(trainer: Trainer) -> None:
    """Refuse a Trainer whose loss is code that the model does not know.

    Raises:
        MemOptError: `compute_loss_func`, or a `compute_loss` of its own.
    """
    if trainer.compute_loss_func is not None:
        raise MemOptError(
            "--ort_module_with_loss with compute_loss_func: that function reads the model's outputs outside of ONNX "
            "Runtime; leave out one of the two, or compute this loss in the model's forward"
        )
    if "compute_loss" in vars(trainer) or type(trainer).compute_loss is not Trainer.compute_loss:
        raise MemOptError(
            f"--ort_module_with_loss with {type(trainer).__name__}'s own compute_loss: it computes the loss outside "
            "of ONNX Runtime, from outputs that would not be there; leave out one of the two, or compute this loss in "
            "the model's forward"
        )
