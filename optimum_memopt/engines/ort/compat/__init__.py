"""ONNX Runtime 1.19.2 on versions of torch that it was not built for.

installation  what is installed, without importing it
ortmodule     ORTModule's import
extensions    its C++ extensions
internals     private names that are patched
"""
