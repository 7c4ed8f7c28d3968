"""The decode step as a CUDA graph against the same model layer by layer; why a model has none, without a GPU."""

import gc
from typing import Any

import pytest
import torch

from crelle.bench.model_shapes import RandomWeights
from crelle.errors import CapacityError
from crelle.kernels.cuda.step_graphs import GraphedDecoder, why_not
from crelle.models.loader import Model, build

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 256,
    "ffn_dim": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 256,
}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 64}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 20}
WIDE = {**LLAMA, "intermediate_size": 512, "num_attention_heads": 2}  # all products leave as digits
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 1024}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 20,
    "norm_weight_offset": 0.0,
}
CONFIGS = {"llama": LLAMA, "opt": OPT, "mistral": MISTRAL, "wide": WIDE, "gpt2": GPT2}
SCHEMES = ["bcq:bits=3,group=128", "rtn:bits=4,group=64", "mixed:four=0.25,outliers=0.002", "fp16"]

# Schemes with quantized activations, and how far logits of a model of one layer may be from the reference's: 16-bit
# floats round some codes the other way, and a model on the CPU in 16 bits is 0.02, 0.2, 0.4 away (8, 4, 3 bits).
ATOM = {
    "atom:w=4,a=4,group=128,outliers=128": 0.4,
    "atom:w=4,a=8,group=128,outliers=128": 0.05,
    "atom:w=8,a=8,group=128,outliers=0": 0.05,
    "atom:w=3,a=3,group=64,outliers=64": 0.7,
    "atom:w=4,a=4,levels=2,group=128,outliers=128": 0.4,
    "atom:w=4,a=8,levels=2,group=128,outliers=128": 0.05,
}


def make(config: dict[str, object], scheme: str, device: str, dtype: torch.dtype | None = None) -> Model:
    where = torch.device(device)
    return build(RandomWeights(config, scheme, where, seed=3), where, dtype=dtype)


def test_a_model_on_the_cpu_says_why_it_has_no_graph() -> None:
    model = make(LLAMA, "rtn:bits=4,group=64", "cpu")
    assert why_not(model) == "graphs of a whole step run on a GPU, not on cpu"
    assert model.graphed() is None


def without_graph(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position in one pass, layer by layer."""
    return model(tokens, model.new_cache(tokens.shape[0]))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return ((found - wanted).norm() / wanted.norm()).item() < 2e-2  # 16-bit activations through three layers


def reference_logits(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """What a model of `make` computes on the CPU, in f32, by the integer reference; its weights are on a GPU."""
    source = model.build.weights

    class OnCpu:
        """The weights, brought over: random ones differ from device to device."""

        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def read(self, name: str) -> torch.Tensor:
            return source.read(name).cpu()

        def matrix(self, module: str) -> Any:
            return source.matrix(module).to("cpu")

    plain = build(OnCpu(), torch.device("cpu"), dtype=torch.float32)  # type: ignore[arg-type]
    with torch.inference_mode():
        return plain(tokens, plain.new_cache(len(tokens)))


def test_the_reference_of_quantized_activations_is_the_model_itself_on_a_cpu() -> None:
    model = make({**LLAMA, "num_hidden_layers": 1}, next(iter(ATOM)), "cpu", torch.float32)
    assert {linear.kernel for linear in model.linears()} <= {"integer-reference", "cpu-integer", "dense"}
    assert torch.equal(reference_logits(model, torch.arange(9)[None]), without_graph(model, torch.arange(9)[None]))
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert torch.equal(attention.q.weight.perm, attention.v.weight.perm)  # one input has one order
    assert torch.equal(mlp.gate.weight.perm, mlp.up.weight.perm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", ATOM)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_steps_with_quantized_activations_are_those_of_the_reference(
    name: str, scheme: str, dtype: torch.dtype
) -> None:
    model = make({**CONFIGS[name], "num_hidden_layers": 1}, scheme, "cuda", dtype)
    assert isinstance(model.graphed(), GraphedDecoder), why_not(model)
    tokens = torch.randint(1000, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted, cache = reference_logits(model, tokens), model.new_cache(2)
    found = [model(tokens[:, :20].cuda(), cache)] + [model(tokens[:, t : t + 1].cuda(), cache) for t in range(20, 40)]
    assert float((torch.cat(found, 1).cpu() - wanted).norm() / wanted.norm()) < ATOM[scheme]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_the_whole_pass(name: str, scheme: str, dtype: torch.dtype) -> None:
    model = make(CONFIGS[name], scheme, "cuda", dtype)
    assert isinstance(model.graphed(), GraphedDecoder), why_not(model)
    for B in (1, 3):
        tokens = torch.randint(0, 1000, (B, 40), device="cuda")
        wanted = without_graph(model, tokens)
        cache = model.new_cache(B)
        found = [model(tokens[:, :25], cache)]
        found += [model(tokens[:, i : i + 1], cache) for i in range(25, 40)]
        assert close(torch.cat(found, 1), wanted) or dtype == torch.bfloat16
        assert ((torch.cat(found, 1) - wanted).norm() / wanted.norm()).item() < 6e-2
        assert cache.length == 40


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_without_the_host_equals_step_by_step(name: str) -> None:
    model = make(CONFIGS[name], "bcq:bits=3,group=128", "cuda")
    graphs = model.graphed()
    assert graphs is not None
    prompt = torch.randint(0, 1000, (2, 10), device="cuda")
    made = graphs.generate(prompt, 30)
    cache, tokens = model.new_cache(2), prompt
    for i in range(30):
        tokens = model(tokens, cache, last=True)[:, -1].argmax(-1, keepdim=True)
        assert torch.equal(tokens[:, 0], made[:, i])
    assert torch.equal(graphs.generate(prompt, 30), made)


@pytest.mark.gpu
def test_caches_do_not_disturb_each_other_and_states_are_used_again() -> None:
    model = make(LLAMA, "bcq:bits=3,group=128", "cuda")
    tokens = torch.randint(0, 1000, (2, 12), device="cuda")
    alone = []
    for row in tokens:
        cache = model.new_cache()
        alone.append(torch.cat([model(t.view(1, 1), cache) for t in row], 1))
    a, b = model.new_cache(), model.new_cache()
    both = [(model(tokens[0, i].view(1, 1), a), model(tokens[1, i].view(1, 1), b)) for i in range(12)]
    for i in (0, 1):
        assert torch.equal(torch.cat([pair[i] for pair in both], 1), alone[i])
    del a, b, cache
    gc.collect()
    graphs = model.graphed()
    assert graphs is not None
    free = len(graphs._free)
    assert free >= 2
    kept = model.new_cache()
    model(tokens[:1, :1], kept)
    assert len(graphs._free) == free - 1


@pytest.mark.gpu
def test_a_cache_that_outgrows_its_state_moves_on() -> None:
    model = make(LLAMA, "rtn:bits=4,group=64", "cuda")
    tokens = torch.randint(0, 1000, (1, 520), device="cuda")
    cache = model.new_cache()
    model(tokens[:, :508], cache)
    found = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(508, 520)], 1)
    assert close(found, without_graph(model, tokens)[:, 508:])


@pytest.mark.gpu
def test_a_full_context_is_refused() -> None:
    model = make({**LLAMA, "max_position_embeddings": 16}, "rtn:bits=4,group=64", "cuda")
    cache = model.new_cache()
    model(torch.zeros(1, 16, dtype=torch.int64, device="cuda"), cache)
    with pytest.raises(CapacityError, match="do not fit the model's context of 16"):
        model(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), cache)


@pytest.mark.gpu
def test_the_step_keeps_no_second_copy_of_the_weights() -> None:
    config = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make(config, "bcq:bits=3,group=128", "cuda")
    alone = torch.cuda.memory_allocated() - before
    model(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), model.new_cache())
    assert torch.cuda.memory_allocated() - before < 1.25 * alone + 40e6  # caches, digits, the graph's own pool
