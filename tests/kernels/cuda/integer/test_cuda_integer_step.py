"""The layers of a decoder with quantized activations as the executor runs them, in the emulator, against the model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from integer_stand_in import run_integer_on_cpu
from plane_weights import relative
from torch import Tensor

from crelle.bench.model_shapes import RandomWeights
from crelle.kernels.base import Problem
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.integer import integer_encode, integer_kernel
from crelle.kernels.cuda.step.decode_step import Step, StepLayer
from crelle.kernels.cuda.step.fused_linear import FusedLinear
from crelle.models.loader import Model, build

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OPT = {"model_type": "opt", "hidden_size": 256, "ffn_dim": 512, "num_attention_heads": 4, "word_embed_proj_dim": 256}
OPT |= {"num_hidden_layers": 1, "vocab_size": 100, "max_position_embeddings": 64, "do_layer_norm_before": True}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "head_dim": 64, "query_pre_attn_scalar": 64, "norm_weight_offset": 0.0}
SCHEMES = {  # and how far logits may be: a norm's last bit moves a code now and then, which moves others
    "atom:w=4,a=4,group=128,outliers=128": 0.2,
    "atom:w=4,a=8,levels=2,group=128,outliers=128": 0.03,
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_integer_on_cpu(monkeypatch)
    takes = ("grouped", "two-level")

    def supports(self: Any, problem: Problem) -> str | None:
        return None if problem.format in takes else "takes integer groups"

    monkeypatch.setattr(integer_kernel.CudaInteger, "supports", supports)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def make(config: dict[str, Any], scheme: str) -> Model:
    model = build(RandomWeights(config, scheme, CPU, seed=3), CPU, dtype=torch.float16)
    assert {linear.kernel for linear in model.linears()} == {"cuda-integer", "dense"}
    return model


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("config", [LLAMA, OPT, GEMMA3], ids=["llama", "opt", "gemma3"])
@pytest.mark.sample(3)
def test_layers_are_those_of_the_model(config: dict[str, Any], scheme: str, batch_invariant: bool) -> None:
    """Sequences of one token, whose attention is v; 9 of them, so that dense matrices take torch."""
    model = make(config, scheme)
    ids = torch.arange(9) * 7 % 100
    with torch.inference_mode():
        wanted = model(ids[:, None], model.new_cache(9))[:, 0]
        step = Step(model)
        joined = [step.layers[0].qkv, step.layers[0].up]
        assert [len(fused.weights) for fused in joined] == [1, 1]
        x = model.input(model.embedding(ids[:, None]), torch.zeros(1, dtype=torch.int64))[:, 0]
        this: Any = SimpleNamespace(step=step, batch_invariant=batch_invariant)

        def attend(i: int, layer: StepLayer, qkv: Tensor) -> Tensor:
            a = layer.spec.attention
            v = qkv.view(len(ids), -1, a.head_size)[:, -a.kv_heads :]
            return v.repeat_interleave(a.heads // a.kv_heads, 1).reshape(len(ids), -1)

        def run(x: Tensor) -> Tensor:
            return CudaExecutor.logits(this, CudaExecutor.run_layers(this, x, attend))

        found = run(x)
        assert relative(found, wanted) < SCHEMES[scheme]
        assert torch.equal(run(x), found)


def test_one_launch_encodes_for_all_that_read_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v, and gate and up, are one product each: four launches of a layer encode, and four multiply."""
    launches = []

    class Counted(EmulatedKernel):
        def __call__(self, *args: Any, **options: Any) -> None:
            launches.append(self.expression)
            super().__call__(*args, **options)

    monkeypatch.setattr(integer_encode, "load", Counted)
    step = Step(make(LLAMA, next(iter(SCHEMES))))
    this: Any = SimpleNamespace(step=step, batch_invariant=False)
    CudaExecutor.run_layers(this, torch.randn(5, 256).half(), lambda i, layer, qkv: qkv[:, :256].contiguous())
    ops = [expression.split("crelle::")[2].split(",")[0] for expression in launches]
    assert ops == ["RMS_NORM", "PLAIN", "RMS_NORM", "SILU_MUL"]
    assert all(isinstance(f, FusedLinear) and f.takes_integers for f in (step.layers[0].o, step.layers[0].down))
