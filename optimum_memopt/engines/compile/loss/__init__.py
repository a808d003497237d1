"""The loss of a language model without its logits: in chunks of rows, of those rows only that have a label."""
