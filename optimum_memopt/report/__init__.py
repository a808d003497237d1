"""The page about a training step.

page      the page: sentences, tables and charts
charts    the charts
snapshot  a step as a PyTorch memory snapshot
"""
