"""Our linears in transformers and in vLLM's layers on a GPU: logits, tokens, captured graphs, experts, memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy
from hf_models import error, own_logits, tokens, write_model
from transformers import AutoModelForCausalLM

from crelle import LLM, CrelleConfig, Sampling
from crelle.formats.base import QuantTensor, format_of
from crelle.integrations.transformers import CrelleCache, CrelleLinear
from crelle.integrations.vllm.product import Experts, Product, Table, handle_of
from crelle.kernels import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
F16 = 2e-2  # of the largest logit: two layers in f16
SCHEMES = {
    "rtn:bits=4,group=64": F16,
    "bcq:bits=3,group=64,rounds=2": F16,
    "mixed:four=0.25,outliers=0.002": F16,
    # f16 rounds activations to other integers than the engine's f32: a CPU in f16 is 0.024 and 0.21 away.
    "atom:w=4,a=8,group=64,outliers=64": 0.05,
    "atom:w=4,a=4,group=64,outliers=64": 0.4,
}


def on_gpu(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, **options).to("cuda")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(tokens().cuda()).logits
    return found.float().cpu()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("cuda") / "m", **SIZES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers(scheme: str, source: Path, tmp_path: Path) -> None:
    checkpoint = quantized_copy(source, tmp_path / "q", scheme)
    model = on_gpu(checkpoint)
    assert error(logits(model), own_logits(checkpoint)) < SCHEMES[scheme]
    linears = [m for m in model.modules() if isinstance(m, CrelleLinear)]
    assert len(linears) == 14
    for m in linears:
        assert (m.kernel or "").startswith("cuda")
        assert all(b.device.type == "cpu" for b in m.buffers())  # the device has the kernel's layout only


def test_experts_of_transformers(tmp_path: Path) -> None:
    moe = write_model("mixtral", tmp_path / "m", **{**SIZES, "intermediate_size": 128})
    checkpoint = quantized_copy(moe, tmp_path / "q", "rtn:bits=4,group=64")
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        assert error(logits(on_gpu(checkpoint)), plain(tokens()).logits) < F16


def test_quantized_while_loading(source: Path, tmp_path: Path) -> None:
    checkpoint = quantized_copy(source, tmp_path / "q", "rtn:bits=4,group=64")
    model = on_gpu(source, quantization_config=CrelleConfig("rtn:bits=4,group=64"))
    assert error(logits(model), own_logits(checkpoint)) < F16


def test_greedy_tokens(source: Path, tmp_path: Path) -> None:
    """Equal to the engine's, but where two tokens are as likely as each other within what f16 leaves."""
    checkpoint = quantized_copy(source, tmp_path / "q", "bcq:bits=3,group=64,rounds=2")
    model, llm = on_gpu(checkpoint), LLM.load(checkpoint, device="cuda")
    prompts = [row.tolist() for row in tokens(12)]
    sampling = Sampling(max_tokens=32, temperature=0)
    for prompt, ours in zip(prompts, llm.generate(prompts, sampling), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        whole = model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = whole[0, len(prompt) :].tolist()
        assert len(ours.tokens) > 8
        pairs = zip(theirs, ours.tokens, strict=False)  # ours end with the end of text
        if (first := next((i for i, (a, b) in enumerate(pairs) if a != b), None)) is not None:
            with torch.no_grad():
                row = model(whole[:, : len(prompt) + first]).logits[0, -1].float()
            assert float((row[theirs[first]] - row[ours.tokens[first]]) / row.std()) < 0.02


def test_compiled(source: Path, tmp_path: Path) -> None:
    model = on_gpu(quantized_copy(source, tmp_path / "q", "rtn:bits=4,group=64"))
    plain = logits(model)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("kv", ["8", "4"])
def test_cache(kv: str, source: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    found = []
    for device in ("cpu", "cuda"):
        model.to(device)
        cache = CrelleCache(model.config, kv)
        with torch.no_grad():
            steps = [model(part.to(device), past_key_values=cache).logits for part in tokens(40).split((32, 4, 4), 1)]
        found.append(torch.cat(steps, 1).cpu())
    assert error(found[1], found[0]) < F16


BCQ = {"format": "bcq", "bits": 3, "group": 64, "bias": True}
UNIFORM = {"format": "uniform", "bits": 4, "group": 64, "symmetric": False}
DENSE = {"format": "dense"}


def random(kind: dict[str, Any], N: int = 256, K: int = 256, seed: int = 0) -> QuantTensor:
    spec = {**kind, "shape": [N, K]}
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed)).to("cuda")


def expected(x: torch.Tensor, *weights: QuantTensor) -> torch.Tensor:
    return torch.cat([x.double() @ w.dequantize(torch.float32).double().T for w in weights], -1)


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kinds", [[BCQ], [UNIFORM] * 3, [BCQ, UNIFORM, DENSE]], ids=["one", "stacked", "apart"])
@pytest.mark.parametrize("M", [1, 7, 64, 300])
def test_a_product_in_a_captured_graph(M: int, kinds: list[Any], dtype: torch.dtype) -> None:
    """In vLLM steps are captured: a replay reads the x of that time, and gives what the op gives without a graph."""
    weights = [random(kind, N, seed=i) for i, (kind, N) in enumerate(zip(kinds, (256, 64, 64), strict=False))]
    product = Product(weights, dtype)
    handle = handle_of(product)
    x = torch.randn(M, 256, dtype=dtype, device="cuda")
    torch.ops.crelle.layer(x, handle, product.N)  # compiles; vLLM too warms up first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.crelle.layer(x, handle, product.N)
    x.copy_(torch.randn_like(x))
    y.fill_(torch.nan)
    graph.replay()
    assert off(y, expected(x, *weights)) < (4e-3 if dtype is torch.float16 else 2e-2)


def test_experts_of_vllm() -> None:
    pairs = [([random(BCQ, 128, seed=e), random(UNIFORM, 128, seed=e)], random(BCQ, 256, 128, e)) for e in range(3)]
    made = [(Product(into, torch.float16), Product([out], torch.float16)) for into, out in pairs]

    def activate(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(h[:, :128]) * h[:, 128:]

    x = torch.randn(4, 256, device="cuda", dtype=torch.float16) / 16
    ids = torch.tensor([[0, 1], [1, 0], [-1, 0], [2, 1]], device="cuda")
    weights = torch.rand(4, 2, device="cuda")
    experts = Experts(made, activate, False)
    found = torch.ops.crelle.experts(x, weights, ids, handle_of(experts))
    want = torch.zeros(4, 256, dtype=torch.float64, device="cuda")
    for m, row in enumerate(ids.tolist()):
        for e, weight in zip(row, weights[m].tolist(), strict=True):
            if e >= 0:
                want[m] += weight * expected(activate(expected(x[m : m + 1], *pairs[e][0])), pairs[e][1])[0]
    assert off(found, want) < 1e-2


def test_a_table_of_vllm() -> None:
    table = Table(random(UNIFORM))
    ids = torch.tensor([[3, 3], [0, 255]], device="cuda")
    found = torch.ops.crelle.lookup(ids, handle_of(table), 256, torch.bfloat16)
    assert torch.equal(found, table.weight.dequantize(torch.bfloat16)[ids])
