"""A model's sessions in ONNX Runtime.

session           builds an ORTModule, and runs forwards through it
module_with_loss  the loss within the graph
graph_plans       plans of a training graph, and their table
module_state      Python state that a graph has baked in
export_cache      exported graphs in a folder
"""
