"""The compile engine: memory plans on stock PyTorch, through torch.compile and a partitioner of AOTAutograd's own."""
