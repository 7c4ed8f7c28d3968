"""OPT: f32 logits against transformers for every option, the cache, quantized checkpoints, calibration, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from conftest import Run, quantized_copy, write_tokenizer
from dequantized_model import write_dequantized
from transformers import AutoModelForCausalLM

from crelle import LLM, Sampling, quantize
from crelle.errors import CapacityError, CrelleError, FormatError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.kernels import cpu
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.models.calibration_model import open_model
from crelle.models.loader import build, load, tied_to
from crelle.quantizers import pipeline
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.pipeline import Calibration
from crelle.quantizers.schemes.awq import AWQ

pytestmark = pytest.mark.sample(2)

# The largest difference of a logit, of size about 1; `cpu` rounds activations to 16 bits.
TOLERANCE = {"transformers": 1e-4, "cache": 2e-5, "reference": 2e-5, "dequantized": 2e-5, "cpu": 1e-3}
CPU = torch.device("cpu")
TOKENS = 200
SIZES = {
    "hidden_size": 72,  # neither a multiple of 32 nor of most groups
    "ffn_dim": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
POST = {"do_layer_norm_before": False, "word_embed_proj_dim": 40}  # as the 350M model
CASES: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "350M: post-norm, projections": POST,
    "post-norm": {"do_layer_norm_before": False},
    "projections": {"word_embed_proj_dim": 40},
    "head of its own": {"tie_word_embeddings": False},
    "350M with a head of its own": {**POST, "tie_word_embeddings": False},
    "no last norm": {"_remove_final_layer_norm": True},
    "no biases": {"enable_bias": False},
    "norms without weights": {"layer_norm_elementwise_affine": False},
    "Galactica": {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False},
}
KINDS = {"pre-norm": {}, "350M": POST}
SCHEMES = ("rtn:bits=4,group=24", "bcq:bits=3,group=32", "rtn:bits=3,group=row,symmetric=true")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def plain(template: Path, tmp_path: Path) -> Path:
    """A random OPT without options, to change at will."""
    return Path(shutil.copytree(template, tmp_path, dirs_exist_ok=True))


def write_random(to: Path, **options: Any) -> Path:
    """Save a model of transformers whose every tensor, biases and norms too, is random and matters."""
    torch.manual_seed(7)
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**{**SIZES, **options}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
            else:
                p.normal_(mean=float(name.endswith("norm.weight")), std=0.2)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


@pytest.fixture(scope="module", params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OPT on disk. Do not write to it."""
    return write_random(tmp_path_factory.mktemp("opt"), **KINDS[request.param])


def change_config(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in drop} | changes
    (path / "config.json").write_text(json.dumps(config))


def change_tensors(path: Path, change: Any) -> None:
    """Rewrite a model's tensors {name: tensor} by what `change` makes of them."""
    file = path / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file, metadata={"format": "pt"})


def random_tokens(n: int = TOKENS, batch: int = 1) -> torch.Tensor:
    return torch.randint(259, (batch, n), generator=torch.Generator().manual_seed(3))


def theirs(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(tokens).logits


def ours(
    path: Path, tokens: torch.Tensor, chunks: tuple[int, ...] = (TOKENS,), kernel: str | None = None
) -> torch.Tensor:
    """Our logits of some tokens, given in chunks that the cache holds together."""
    model, _ = load(path, device="cpu", kernel=kernel)
    cache = model.new_cache(len(tokens))
    return torch.cat([model(part, cache) for part in tokens.split(chunks, dim=1)], dim=1)


# The same numbers as transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In one pass, and by a prompt, a chunk and single tokens."""
    path, tokens = write_random(tmp_path, **CASES[case]), random_tokens()
    expected = theirs(path, tokens)
    assert expected.std() > 0.3  # otherwise a small difference would mean nothing
    assert (ours(path, tokens) - expected).abs().max() <= TOLERANCE["transformers"]
    decoded = ours(path, tokens, chunks=(110, 4, 36, *[1] * 50))
    assert (decoded - expected).abs().max() <= TOLERANCE["transformers"]


@pytest.mark.parametrize(
    "changes",
    [{"do_layer_norm_before": False}, {"_remove_final_layer_norm": True}, {"activation_function": "gelu"}],
    ids=lambda changes: next(iter(changes)),
)
def test_option_changes_the_logits(changes: dict[str, Any], plain: Path) -> None:
    path, tokens = plain, random_tokens()
    without = ours(path, tokens)
    change_config(path, **changes)
    assert (ours(path, tokens) - without).abs().max() > 100 * TOLERANCE["transformers"]


def test_options_that_are_left_out_get_the_defaults_of_transformers(plain: Path) -> None:
    path, tokens = plain, random_tokens()
    expected = ours(path, tokens)
    kept = ("model_type", *SIZES)
    change_config(path, drop=tuple(k for k in json.loads((path / "config.json").read_text()) if k not in kept))
    assert torch.equal(ours(path, tokens), expected)
    assert (theirs(path, tokens) - expected).abs().max() <= TOLERANCE["transformers"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_without_the_outer_model_mean_the_same(kind: str, tmp_path: Path) -> None:
    path, tokens = write_random(tmp_path, **KINDS[kind]), random_tokens()
    expected = ours(path, tokens)
    change_tensors(path, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()})
    assert torch.equal(ours(path, tokens), expected)
    assert tied_to(open_weights(path)) == "decoder.embed_tokens"


def test_head_that_is_stored_though_tied_is_not_read(plain: Path) -> None:
    path, tokens = plain, random_tokens()
    expected = ours(path, tokens)
    change_tensors(path, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(259, 72)})
    assert torch.equal(ours(path, tokens), expected)


# The cache ---------------------------------------------------------------------------------------------------------


def test_one_token_at_a_time_gives_the_logits_of_one_pass(small: Path) -> None:
    tokens = random_tokens(256)  # the whole context
    whole = ours(small, tokens, (256,))
    assert (ours(small, tokens, (1,) * 256) - whole).abs().max() <= TOLERANCE["cache"]


def test_batched_equals_single_rows(small: Path) -> None:
    tokens, chunks = random_tokens(30, batch=3), (17, 1, 1, 11)
    single = torch.cat([ours(small, row[None], chunks) for row in tokens])
    assert (ours(small, tokens, chunks) - single).abs().max() <= TOLERANCE["cache"]


def test_last_gives_only_the_last_logits(small: Path) -> None:
    model, tokens = load(small, device="cpu")[0], random_tokens(20)
    last = model(tokens, model.new_cache(), last=True)
    assert last.shape == (1, 1, 259)
    assert (last - model(tokens, model.new_cache())[:, -1:]).abs().max() <= TOLERANCE["cache"]


def test_too_many_tokens_are_refused_and_leave_the_cache_as_it_was(small: Path) -> None:
    model, tokens = load(small, device="cpu")[0], random_tokens(257)
    cache = model.new_cache()
    model(tokens[:, :250], cache)
    with pytest.raises(CapacityError, match="257 tokens do not fit the model's context of 256"):
        model(tokens[:, 250:], cache)
    assert cache.length == 250


# Quantized ---------------------------------------------------------------------------------------------------------


def kernels() -> list[str]:
    return ["reference", "dequantized", *(["cpu"] if cpu.available() is None else [])]


CHUNKS = 40, *[1] * 20


@pytest.fixture(scope="module", params=SCHEMES)
def coded(
    request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """A quantized model and the logits of what its weights stand for."""
    to = tmp_path_factory.mktemp("coded")
    quantized_copy(small, to / "q", request.param)
    expected = ours(write_dequantized(to / "q", to / "plain"), random_tokens(60), CHUNKS)
    assert (ours(small, random_tokens(60), CHUNKS) - expected).abs().max() > 0.05  # quantizing changed something
    return to / "q", expected


@pytest.mark.parametrize("kernel", kernels())
def test_logits_equal_those_of_the_dequantized_weights(coded: tuple[Path, torch.Tensor], kernel: str) -> None:
    path, expected = coded
    assert (ours(path, random_tokens(60), CHUNKS, kernel) - expected).abs().max() <= TOLERANCE[kernel]


def test_quantized_embeddings_and_projections_equal_the_dequantized_ones(small: Path, tmp_path: Path) -> None:
    quantize(small, tmp_path / "q", "fp32", head="rtn:bits=4,group=20")
    tokens = random_tokens(60)
    expected = ours(write_dequantized(tmp_path / "q", tmp_path / "plain"), tokens, (60,))
    assert (ours(tmp_path / "q", tokens, (60,)) - expected).abs().max() <= TOLERANCE["cpu"]
    assert (ours(small, tokens, (60,)) - expected).abs().max() > 0.05


def test_a_layer_s_matrices_are_quantized_and_nothing_else(small: Path, tmp_path: Path) -> None:
    quantize(small, tmp_path / "q", SCHEMES[0])
    made = Checkpoint(tmp_path / "q")
    coded = {m for m, spec in made.specs.items() if spec["format"] != "dense"}
    names = [*(f"self_attn.{p}_proj" for p in ("q", "k", "v", "out")), "fc1", "fc2"]
    assert coded == {f"model.decoder.layers.{i}.{n}" for i in range(2) for n in names}


def test_another_precision_of_nested_planes_shares_all_else(small: Path, tmp_path: Path) -> None:
    quantized_copy(small, tmp_path / "q", "bcq-nested:bits=4,group=24,data=false")
    fine, _ = load(tmp_path / "q", device="cpu")
    coarse = fine.at(2)
    assert coarse.embedding.weight is fine.embedding.weight
    tokens = random_tokens(40)
    expected = load(tmp_path / "q", device="cpu", bits=2)[0]
    assert torch.equal(coarse(tokens, coarse.new_cache()), expected(tokens, expected.new_cache()))
    assert not torch.equal(coarse(tokens, coarse.new_cache()), fine(tokens, fine.new_cache()))


def test_all_linear_layers_are_listed_in_the_order_in_which_they_run(small: Path) -> None:
    model, weights = load(small, device="cpu")
    names = [layer.name.removeprefix("model.decoder.") for layer in model.linears()]
    layer = [*(f"self_attn.{p}_proj" for p in ("q", "k", "v", "out")), "fc1", "fc2"]
    inside = [f"layers.{i}.{n}" for i in range(2) for n in layer]
    narrow = model.spec.embedding_width != model.spec.width
    assert names == (["project_in", *inside, "project_out", "lm_head"] if narrow else [*inside, "lm_head"])
    assert isinstance(model.decoder, FusedDecoder)
    assert tied_to(weights) == "model.decoder.embed_tokens"


def test_a_model_speaks(small: Path, tmp_path: Path) -> None:
    quantize(small, tmp_path / "q", SCHEMES[0])
    llm = LLM.load(tmp_path / "q", device="cpu")
    llm.end_ids = frozenset()
    said = llm.generate("The ", Sampling(max_tokens=12))
    assert len(said.tokens) == 12
    ids = llm.tokenizer.encode("The ")
    logits = llm.model(torch.tensor([ids + said.tokens]), llm.model.new_cache())
    assert logits[0, len(ids) - 1 : -1].argmax(-1).tolist() == said.tokens


def test_the_command_line_quantizes_and_runs_it(small: Path, tmp_path: Path, crelle: Run) -> None:
    (tmp_path / "text.txt").write_text("All that glitters is not gold. " * 20)

    def ask(*args: object) -> dict[str, Any]:
        done = crelle(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    q = tmp_path / "q"
    assert ask("quantize", small, q, "--scheme", "bcq:bits=3,group=24")["scheme"] == "bcq:bits=3,group=24"
    assert len([x for x in ask("inspect", q)["layers"] if x["format"] == "bcq"]) == 12
    said = [ask("eval", path, "--text", tmp_path / "text.txt", "--context", 64) for path in (small, q)]
    assert said[0]["tokens"] == said[1]["tokens"]
    assert 1 < said[0]["perplexity"] != said[1]["perplexity"]
    assert ask("generate", q, "--prompt", "All that", "--max-tokens", 5)["text"] is not None
    seen = ask("explain", q, "--device", "cpu")
    assert {x["name"] for x in seen["layers"]} == {x.name for x in load(q, device="cpu")[0].linears()}
    assert (seen["fused"], seen["why_not_fused"]) == (True, None)
    made = ask("quantize", small, tmp_path / "g", "--scheme", "gptq:bits=3,group=24", "--calib", tmp_path / "text.txt")
    assert made["scheme"].startswith("gptq:")


# Calibrated --------------------------------------------------------------------------------------------------------


def test_the_open_model_computes_what_the_model_computes(small: Path) -> None:
    weights, tokens = open_weights(small), random_tokens(32, batch=6)
    opened = open_model(weights)
    x = opened.embed(tokens)
    for i in range(opened.layers):
        x = opened.block(i)(x)
    model = build(weights, CPU)
    torch.testing.assert_close(opened.logits(opened.finish(x)), model(tokens, model.new_cache(6)), rtol=1e-5, atol=1e-5)


def test_folding_leaves_the_function_as_it_was(small: Path) -> None:
    walk = Calibrator(open_model(open_weights(small)), random_tokens(40, batch=6), half=False).begin()
    weights = {n: x.weight.clone() for n, x in walk.full.linears().items()}
    changed = AWQ(bits=3, group=24).before_layer(walk)
    after = walk.full(walk.hidden.full)
    assert (after - walk.after).abs().max() < 1e-5 * walk.after.abs().max()
    at = "model.decoder.layers.0"
    assert changed.keys() == {f"{at}.self_attn.v_proj.bias", f"{at}.fc1.bias"}
    assert any((x.weight - weights[n]).abs().max() > 0.01 for n, x in walk.full.linears().items())


def test_gelu_takes_no_scale(tmp_path: Path) -> None:
    opened = open_model(open_weights(write_random(tmp_path, activation_function="gelu")))
    assert [fold.source for fold in opened.block(0).folds()] == ["model.decoder.layers.0.self_attn.v_proj.weight"]


@pytest.mark.parametrize("scheme", ["gptq:bits=3,group=24", "awq:bits=3,group=24"])
def test_calibrated_schemes_beat_rounding(scheme: str, small: Path, tmp_path: Path) -> None:
    tokens = random_tokens(64, batch=12)
    pipeline.quantize(small, tmp_path / "q", scheme, calibration=Calibration(tokens, open_model, CPU))
    quantize(small, tmp_path / "rtn", "rtn:bits=3,group=24")
    full, fitted, rounded = (ours(path, tokens, (64,)) for path in (small, tmp_path / "q", tmp_path / "rtn"))
    assert (fitted - full).square().mean() < (rounded - full).square().mean()


# Refusals ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[CrelleError], str]] = {
    "other family": (
        {"model_type": "bloom"},
        UnsupportedError,
        r"'bloom' is not one that Crelle runs \(.*llama, .*, opt, .*\)",
    ),
    "model type of no kind": ({"model_type": ["opt"]}, UnsupportedError, "model type .* is not one"),
    "activation": ({"activation_function": "silu"}, UnsupportedError, r"'silu' is not one of OPT's \(relu, gelu\)"),
    "heads": ({"num_attention_heads": 5}, UnsupportedError, "width 72 cannot be shared out among 5 heads"),
    "no heads": ({"num_attention_heads": 0}, FormatError, "num_attention_heads' .* from 1 to 16,384, but is 0"),
    "context": ({"max_position_embeddings": 99}, FormatError, "positions.weight' is 258 x 72, .* asks for 101 x 72"),
    "inner width": ({"ffn_dim": 99}, FormatError, "fc1.weight' is 100 x 72, .* asks for 99 x 72"),
    "words": ({"word_embed_proj_dim": 64}, FormatError, "embed_tokens.weight' is 259 x 72, .* asks for 259 x 64"),
    "too many layers": ({"num_hidden_layers": 3}, FormatError, "has 3 layers .* no tensor of layer 2"),
    "head": ({"tie_word_embeddings": False}, FormatError, "has no tensor 'lm_head.weight'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_that_cannot_be_run_is_refused_with_a_sentence(case: str, plain: Path) -> None:
    changes, error, sentence = REFUSED[case]
    change_config(plain, **changes)
    with pytest.raises(error, match=sentence):
        load(plain, device="cpu")


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.fc1.bias",
        "layers.1.self_attn.k_proj.bias",
        "layers.0.final_layer_norm.bias",
        "final_layer_norm.weight",
    ],
)
def test_missing_tensor_is_refused_by_name(name: str, plain: Path) -> None:
    gone = f"model.decoder.{name}"
    change_tensors(plain, lambda tensors: {n: t for n, t in tensors.items() if n != gone})
    with pytest.raises(FormatError, match=f"has no tensor '{gone}'"):
        load(plain, device="cpu")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "ffn_dim", "vocab_size"])
def test_config_without_a_size_is_refused(key: str, plain: Path) -> None:
    change_config(plain, drop=(key,))
    with pytest.raises(FormatError, match=f"lacks the key '{key}'"):
        load(plain, device="cpu")
