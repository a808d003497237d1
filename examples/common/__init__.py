"""Shared by the example scripts: arguments, and data and a model that can be installed with pip."""
