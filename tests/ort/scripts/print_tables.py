"""Prints the plan tables of four models, without a plan and at level 1."""

from optimum_memopt.engines.api.run import Selection
from tests.ort.helpers import train

for name in ("roberta-mlm", "deberta-v2-classification", "gpt2", "t5"):
    for selection in (Selection(), Selection(level=1)):
        print(train(name, selection).plans().to_json())
