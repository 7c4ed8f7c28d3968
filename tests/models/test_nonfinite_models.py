"""NaN and infinity in a checkpoint: refused by name where they spoil everything, otherwise never a finite answer."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import quantized_copy, write_tiny_model
from torch import Tensor

from crelle.errors import CrelleError, FormatError
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.formats.storage.open import open_weights
from crelle.kernels.cpu import available
from crelle.kernels.cpu.executor import CpuExecutor
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.executor import Chunk
from crelle.models.builder import Builder
from crelle.models.eager_executor import EagerExecutor
from crelle.models.fused import fuse
from crelle.models.loader import Model, build, load
from crelle.quantizers.pipeline import quantize

VALUES = [math.nan, math.inf, -math.inf]
SPOILED = 7  # the token whose embedding is not finite
SCHEMES = ["f32", "rtn:bits=4,group=24", "bcq:bits=2,group=24"]


def write_opt(to: Path) -> Path:
    width, vocabulary, rng = 24, 259, torch.Generator().manual_seed(0)
    config = {
        "model_type": "opt",
        "hidden_size": width,
        "ffn_dim": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": width,
        "tie_word_embeddings": False,
        "do_layer_norm_before": True,
    }
    write_tiny_model(to)  # its tokenizer

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=rng) / k**0.5

    at = "model.decoder"
    tensors = {
        f"{at}.embed_tokens.weight": matrix(vocabulary, width),
        f"{at}.embed_positions.weight": matrix(66, width),
    }
    tensors["lm_head.weight"] = matrix(vocabulary, width)
    norms = [f"{at}.final_layer_norm"]
    for i in range(2):
        linears = {f"self_attn.{n}_proj": (width, width) for n in ("q", "k", "v", "out")}
        for name, (n, k) in {**linears, "fc1": (40, width), "fc2": (width, 40)}.items():
            tensors[f"{at}.layers.{i}.{name}.weight"] = matrix(n, k)
            tensors[f"{at}.layers.{i}.{name}.bias"] = 0.1 * torch.randn(n, generator=rng)
        norms += [f"{at}.layers.{i}.self_attn_layer_norm", f"{at}.layers.{i}.final_layer_norm"]
    for norm in norms:
        tensors[f"{norm}.weight"], tensors[f"{norm}.bias"] = torch.ones(width), torch.zeros(width)
    safetensors.torch.save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    return to


def write_llama(to: Path) -> Path:
    return write_tiny_model(to, num_hidden_layers=2)


WRITERS = {"llama": write_llama, "opt": write_opt}


def spoil(path: Path, name: str, at: int | tuple[int, int], value: float) -> None:
    """Write a value that is not finite into a model of one file."""
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors[name][at] = value
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Checkpoints of every family and scheme, each written once; embeddings stay plain matrices."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, scheme: str) -> Path:
        if (family, scheme) not in made:
            to = tmp_path_factory.mktemp("spoiled")
            path = WRITERS[family](to / "m")
            if scheme != "f32":
                path = quantized_copy(path, to / "q", scheme, overrides={"*embed_tokens": "fp16"})
            made[family, scheme] = path
        return made[family, scheme]

    return get


Spoiled = Callable[..., Model]


@pytest.fixture(scope="module")
def spoiled(checkpoints: Callable[[str, str], Path]) -> Spoiled:
    """A model whose embedding of one token is not finite: a plain matrix, which loading leaves as it is."""

    def get(family: str, scheme: str, value: float, kernel: str | None = None) -> Model:
        model = build(open_weights(checkpoints(family, scheme)), torch.device("cpu"), kernel=kernel)
        table: Any = model.embedding.weight
        weight = table.weight.clone()  # what is mapped from the file is everybody's
        weight[SPOILED, 3] = value
        object.__setattr__(table, "weight", weight)
        model.decoder = fuse(model)
        return model

    return get


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.input_layernorm.weight"),
        ("llama", "model.norm.weight"),
        ("opt", "model.decoder.layers.0.fc1.bias"),
        ("opt", "model.decoder.layers.1.self_attn_layer_norm.bias"),
    ],
)
def test_a_vector_that_is_not_finite_is_refused_by_name(family: str, name: str, value: float, tmp_path: Path) -> None:
    path = WRITERS[family](tmp_path / "m")
    spoil(path, name, 5, value)
    with pytest.raises(
        FormatError, match=rf"'{name}' has 1 of \d+ values that are NaN or infinite, the first at \[5\]"
    ):
        load(path, device="cpu")


@pytest.mark.parametrize(
    ("scheme", "part"),
    [("rtn:bits=4,group=24", "scale"), ("bcq:bits=2,group=24", "alpha"), ("bcq:bits=2,group=24,bias=true", "z")],
)
def test_a_scale_that_is_not_finite_is_refused_by_name(
    scheme: str, part: str, tiny_model: Path, tmp_path: Path
) -> None:
    quantized_copy(tiny_model, tmp_path / "q", scheme)
    weights = open_weights(tmp_path / "q")
    name = "model.layers.1.self_attn.q_proj"
    matrix = weights.matrix(name)
    stored = matrix.tensors()
    if part not in stored:
        pytest.skip(f"{scheme} stores {sorted(stored)}")
    stored[part].view(-1)[3] = math.nan

    class Spoiled:
        path, config = weights.path, weights.config

        def matrix(self, module: str) -> Any:
            return matrix if module == name else weights.matrix(module)

    builder = Builder(Spoiled(), frozenset(weights.names()), torch.float32, torch.device("cpu"), None)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=rf"'{name}.{part}' has 1 of \d+ values that are NaN"):
        builder.matrix(name, *matrix.shape)


def test_quantizing_refuses_a_matrix_that_is_not_finite(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    spoil(path, "model.layers.1.mlp.up_proj.weight", (3, 4), math.nan)
    for scheme in SCHEMES[1:]:
        with pytest.raises(CrelleError, match=r"layers\.1\.mlp\.up_proj"):
            quantize(path, tmp_path / scheme[:3], scheme)


def test_centres_of_keys_that_are_not_finite_are_refused(spoiled: Spoiled) -> None:
    model = spoiled("llama", "f32", math.nan)
    table: Any = model.embedding.weight
    table.weight[:] = math.nan
    with pytest.raises(FormatError, match="the keys of layer 0 are not finite"):
        model.new_cache(1, kv=4)


# --- running ----------------------------------------------------------------------------------------------------------


def check(before: Tensor, after: Tensor, touched: list[bool], exact: bool = True) -> None:
    """Rows that are touched are not finite; the others keep their bits, or nearly, where torch computes them."""
    for was, now, hit in zip(before, after, touched, strict=True):
        if hit:
            assert not now.isfinite().any()
        elif exact:
            assert torch.equal(was, now)
        else:
            torch.testing.assert_close(was, now, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kernel", [None, "cpu-int8", "reference"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.sample(3)
def test_a_model_tells_who_is_concerned(
    family: str, scheme: str, kernel: str | None, value: float, spoiled: Spoiled
) -> None:
    """Prompts, then steps, of three sequences: layer by layer, or fused where the model can be."""
    if kernel == "cpu-int8" and scheme == "f32":
        pytest.skip("a plain model has nothing to round")
    model = spoiled(family, scheme, value, kernel)
    for kv in (16, 8, "kv4:center=false"):
        fmt = KVFormat.parse(f"kv{kv}:center=false" if kv == 8 else kv)

        def run(bad: bool, fmt: KVFormat = fmt) -> list[Tensor]:
            cache = model.new_cache(3, kv=fmt)
            prompt, step = torch.full((3, 20), 11), torch.tensor([[1], [2], [3]])
            if bad:
                prompt[1, 9], step[2, 0] = SPOILED, SPOILED
            return [model(prompt, cache, last=True)[:, 0], model(step, cache)[:, 0], model(step * 0 + 5, cache)[:, 0]]

        for i, (was, now) in enumerate(zip(run(False), run(True), strict=True)):
            check(
                was,
                now,
                [False, True, i > 0],
                isinstance(model.decoder, FusedDecoder) and kernel != "reference" and scheme != "f32",
            )


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("how", ["core", "layers", "layers, not invariant"])
@pytest.mark.parametrize(("family", "scheme"), [("llama", SCHEMES[1]), ("llama", "f32"), ("opt", SCHEMES[2])])
@pytest.mark.sample(3)
def test_a_batch_tells_who_is_concerned(family: str, scheme: str, how: str, value: float, spoiled: Spoiled) -> None:
    model = spoiled(family, scheme, value)
    decoder, exact = model.decoder, how != "layers, not invariant"
    if how == "core" and not isinstance(decoder, FusedDecoder):
        pytest.skip("has no step in C++")
    for text in ("kv16", "kv8:center=false", "kv4:center=false"):
        fmt, s = KVFormat.parse(text), model.spec

        def run(bad: bool, fmt: KVFormat = fmt, s: Any = s) -> Tensor:
            layers = [KVPages.new(fmt, 12, s.kv_heads, s.head_size, torch.float32, "cpu") for _ in s.layers]
            none = [None] * len(s.layers)
            executor: Any = (
                CpuExecutor(decoder, layers)
                if isinstance(decoder, FusedDecoder) and how == "core"
                else EagerExecutor(model, layers, none, batch_invariant=exact)
            )
            prompts = [[11] * 5, [12] * 6, [13] * 30]
            if bad:
                prompts[1][2] = SPOILED
            pages = [list(range(4 * b, 4 * b + 4)) for b in range(3)]
            first = executor.run([Chunk(ids, 0, pages[b], True, prompt=len(ids)) for b, ids in enumerate(prompts)])
            then = [Chunk([b + 1], len(ids), pages[b], True, prompt=len(ids)) for b, ids in enumerate(prompts)]
            return torch.cat([first, executor.run(then)])

        check(run(False), run(True), [False, True, False] * 2, exact)


@pytest.mark.skipif(available() is not None, reason="needs the C++ extension")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(3)
def test_tokens_before_it_in_a_prompt_are_not_concerned(scheme: str, value: float, spoiled: Spoiled, isa: str) -> None:
    model = spoiled("llama", scheme, value)
    decoder: Any = model.decoder
    assert isinstance(decoder, FusedDecoder)
    for kv in ("kv16", "kv8:center=false"):

        def run(bad: bool, kv: str = kv) -> Tensor:
            cache, tokens = model.new_cache(1, kv=kv), torch.arange(50) + 10
            cache.grow(60)
            if bad:
                tokens[29] = SPOILED
            first = decoder.prefill(tokens, 0, cache.stored(), last=False)
            more = decoder.step(
                tokens[:9], torch.arange(50, 59), cache.stored(), rows=torch.zeros(9, dtype=torch.int64)
            )
            return torch.cat([first, more])

        check(run(False), run(True), [False] * 29 + [True] * 30)


@pytest.mark.skipif(available() is not None, reason="needs the C++ extension")
def test_a_step_shows_nan(spoiled: Spoiled) -> None:
    model = spoiled("llama", "rtn:bits=4,group=24", math.nan)
    decoder: Any = model.decoder
    cache = model.new_cache(2)
    cache.grow(4)
    logits = decoder.step(torch.tensor([SPOILED, 1]), torch.tensor([0, 0]), cache.stored())
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()
