"""What an engine is: types that both engines and their callers import.

engine        Engine
factory       EngineFactory: what an engine answers before it has a model
run           options, Selection, Run
predictions   predicted steps, and the workloads that they are for
explanations  a step that ran out of memory
"""
