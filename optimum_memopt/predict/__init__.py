"""Predictions from Python, before anything is loaded.

workload  a model from its config or as a module, with a batch
adapter   PEFT's adapter, and quantized weights
plan      `plan()`
simulate  `simulate()`
phases    memory of a run's phases beside the training step
advise    the best micro-batch
"""
