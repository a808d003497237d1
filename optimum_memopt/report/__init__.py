"""The page about a training step.

page      numbers, tables, pictures
charts    pictures
snapshot  a step in PyTorch's format of memory snapshots
"""
