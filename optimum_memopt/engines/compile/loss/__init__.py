"""The loss of a language model without its logits: computed in chunks of the rows that have a label.

find      finds losses in dynamo's graph
decide    decides which losses are chunked, and rewrites the graph
operator  the chunked loss
chunk     cross entropy and gradient of a chunk
"""
