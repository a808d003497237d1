"""Predictions from Python, before anything is loaded.

workload  a model by its config, with a batch
adapter   PEFT's adapter, and quantized weights
plan      `plan()`
simulate  `simulate()`
phases    what a run takes beside its step
advise    the best micro-batch
"""
