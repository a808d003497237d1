"""Paths of transformer layers, and of modules within them."""

import re
from functools import cache

# Names of layer lists in transformers and timm (also `albert_layers`); the first match in a path is the transformer
# layer.
_LAYER = re.compile(r"(?:^|\.)(?:\w+_)?(?:layers?|h|blocks?)\.\d+(?=\.|$)")
# A layer's index in its list, with an optional repeat number: `layer.0@1`.
_NUMBER = re.compile(r"\d+(?:@\d+)?$")


@cache
def layer_in(path: str) -> str:
    """Returns the path of the transformer layer that a module or parameter path is in, "" outside of all layers."""
    match = _LAYER.search(path)
    return path[: match.end()] if match else ""


def within_layer(path: str, layer: str) -> str:
    """Returns the path of a module within its layer; `path` itself outside of all layers."""
    return path.removeprefix(layer.partition("@")[0]).removeprefix(".")


def equal_layers(layer: str) -> str:
    """Returns the path that all layers of a list share: `model.layers.*` for `model.layers.3`."""
    return _NUMBER.sub("*", layer)
