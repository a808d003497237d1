"""The loss of a language model without its logits: in chunks of rows, of those rows only that have a label.

find      the loss in dynamo's graph
decide    whether it is chunked, and the graph with a chunked one
operator  the chunked loss
chunk     cross entropy and gradient of a chunk
"""
