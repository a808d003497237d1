"""What the compile engine refuses, each in a line that names a suggestion."""

import pytest
import torch
from transformers import TrainingArguments

from optimum_memopt.engines.compile.capture.capture import check_model, check_trainer_arguments
from optimum_memopt.errors import MemOptError, UnsupportedModelError


def refused(check, error):
    with pytest.raises(error) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_data_parallel():
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    assert "accelerate launch" in refused(lambda: check_model(model), UnsupportedModelError)


def test_several_gpus_in_one_process(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    check_trainer_arguments(args)
    args._n_gpu = 2
    line = refused(lambda: check_trainer_arguments(args), MemOptError)
    assert "2 GPUs in one process" in line and "CUDA_VISIBLE_DEVICES=0" in line
