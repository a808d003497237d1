"""Trains one step with an export cache in the folder given as argument."""

import sys

from tests.ort.helpers import MLM, optimize
from tests.trainer_runs import log_lines

with log_lines() as lines:
    model = MLM.build()
    optimize(model, ort_cache_dir=sys.argv[1])
    model(**MLM.batch()).loss.backward()
print(*lines, sep="\n")
