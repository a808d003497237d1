"""Gradients of grouped 1D convolutions, whose kernel in ONNX Runtime writes past its buffer."""

from tests import fresh_process
from tests.ort.helpers import needs_ort, run_script

pytestmark = needs_ort


def test_grouped_convolutions_over_one_dimension_train(tmp_path):
    run_script("train_grouped_convolutions.py", cwd=tmp_path, run=fresh_process.run)
