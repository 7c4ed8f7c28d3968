"""Weights of the layers that no scheme quantizes: tensors that are not a linear layer's matrix [outputs, inputs].

Such are experts in a fused layout that crelle.formats.storage.fused_experts does not take apart (Llama 4, gpt-oss), and
convolutions. They go into a checkpoint as they are; reports count their bits and say what they are.
"""

import re
from math import prod

from crelle.formats.storage.open import Weights, is_matrix

LAYER = re.compile(r"^(.*?\.\d+)\.")


def is_layer(name: str) -> bool:
    """Tell whether a shard or module, by its name, is a decoder layer or in one."""
    return LAYER.match(f"{name}.") is not None


def unquantized(weights: Weights) -> list[str]:
    """Return the tensors of the layers that have two dimensions or more and are neither matrices nor biases."""
    return [
        name
        for name in weights.names()
        if is_layer(name)
        and len(weights.shape(name)) >= 2
        and not is_matrix(weights, name)
        and not name.endswith("bias")
    ]


def sentences_about(weights: Weights) -> tuple[str, ...]:
    """Return the warning about such tensors; nothing where there are none."""
    if not (left := unquantized(weights)):
        return ()
    many = [n for n in weights.names() if is_layer(n) and len(weights.shape(n)) >= 2 and not n.endswith("bias")]
    share = sum(prod(weights.shape(n)) for n in left) / max(1, sum(prod(weights.shape(n)) for n in many))
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in left)
    example = " x ".join(map(str, weights.shape(left[0])))
    names = ", ".join(f"'{kind}'" for kind in list(kinds)[:3]) + (", …" if len(kinds) > 3 else "")
    count = "1 tensor" if len(left) == 1 else f"{len(left)} tensors"
    return (
        f"{count} of the layers ({share:.1%} of their weights) cannot be quantized because they are not stored as "
        f"matrices of linear layers ({names}; the first is {example}); the bits per weight include them",
    )
