"""Which activations the CUDA kernels have, and the sentence where they have none; no GPU needed."""

from typing import get_args

import pytest

from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.step.activations import Prologue, activation_op, by_torch, is_gated, supports, width


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "swigluoai", "tanh"])
def test_an_activation_is_there_or_refused_in_a_sentence(activation: str, gated: bool) -> None:
    if reason := supports(activation, gated):
        assert activation == "tanh" or (activation, gated) == ("swigluoai", False)
        assert reason.startswith(
            f"has no {'gated ' if gated else ''}{activation} activation, only gated silu, relu, gelu"
        )
    elif by_torch(activation, gated) is not None:
        assert (activation, gated) in {("silu", False), ("relu", True), ("swigluoai", True)}
        assert activation_op(activation, gated) == "PLAIN"
    else:
        op = activation_op(activation, gated)
        assert op in get_args(Prologue)
        assert is_gated(op) == gated
        assert width(op) == 1 + gated


def test_every_activation_has_an_epilogue_that_encodes() -> None:
    for op in get_args(Prologue):
        assert op == "PLAIN" or is_gated(bmma_gemv._ENCODING[op]) == is_gated(op)
    assert {*bmma_gemv._ENCODING.values(), "STORE"} == set(bmma_gemv.EPILOGUES)
