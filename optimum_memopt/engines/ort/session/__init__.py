"""The ONNX Runtime session of a model.

session           builds an ORTModule and runs forwards through it
module_with_loss  moves the loss into the graph
graph_plans       plans of a training graph, and their table
module_state      Python state baked into a graph
export_cache      cache folder of exported graphs
"""
