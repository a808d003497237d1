"""Shared by the example scripts: arguments, and data and a model from pip packages."""
