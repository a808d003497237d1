"""Runs ONNX Runtime 1.19.2 on versions of torch that it was not built for.

installation  inspects the installed ONNX Runtime without importing it
ortmodule     imports ORTModule
extensions    builds and loads its C++ extensions
internals     patches private names of ORT and torch
"""
