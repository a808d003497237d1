"""The engine interface: types that both engines and their callers import.

engine        Engine
factory       EngineFactory: what an engine can answer before it has a model
run           options, Selection, Run
layer_paths   paths of transformer layers
predictions   predicted steps, and the workloads that are predicted
explanations  explanations of steps that ran out of memory
"""
