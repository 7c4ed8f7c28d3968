"""Calibrated quantization of any transformers model: better than rounding, saved bit for bit; encoders too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import error, logits, own_logits, tokens, write_model
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel
from transformers.pytorch_utils import Conv1D

from crelle.errors import SchemeError, UnsupportedError
from crelle.integrations.transformers import calibration, quantize
from crelle.integrations.transformers.block_inputs import BlockInputs, Call, calls_of

BATCHES = [torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(s)) for s in (5, 6)]


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def fitting_error(model: Any, full: Any) -> float:
    """Of the last hidden states, on the calibration batches."""
    with torch.no_grad():
        a, b = (torch.cat([m.base_model(x).last_hidden_state for x in BATCHES]) for m in (model, full))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", ["phi", "gpt2", "llama"])
def test_better_than_rounding(family: str, tmp_path: Path) -> None:
    """Families whose blocks differ: parallel attention and feed-forward, Conv1D, and one that our engine runs too."""
    path = write_model(family, tmp_path / "m")
    rounded, fitted = load(path), load(path)
    report = quantize(rounded, "rtn:bits=3,group=32")
    assert report.bits_per_weight == quantize(fitted, "gptq:bits=3,group=32", BATCHES).bits_per_weight
    full = load(path)
    assert fitting_error(fitted, full) < 0.8 * fitting_error(rounded, full)
    fitted.save_pretrained(tmp_path / "q")
    assert torch.equal(logits(load(tmp_path / "q")), logits(fitted))
    if family != "phi":
        assert error(own_logits(tmp_path / "q"), logits(fitted)) < 5e-4


@pytest.mark.parametrize("scheme", ["hbcq:bits=2,group=16", "mixed:four=0.25", "atom:w=4,a=4,group=16,outliers=16"])
def test_other_schemes(scheme: str, tmp_path: Path) -> None:
    model, full = load(path := write_model("phi", tmp_path / "m")), load(path)
    quantize(model, scheme, BATCHES, overrides={"*.fc2": "rtn:bits=8,group=32"})
    assert fitting_error(model, full) < 1
    assert ("folds=false" in model.config.quantization_config.scheme) == scheme.startswith("atom")
    model.save_pretrained(tmp_path / "q")
    assert torch.equal(logits(load(tmp_path / "q")), logits(model))


def test_an_encoder_and_its_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=259, **sizes)).save_pretrained(tmp_path / "m")
    short = {"input_ids": BATCHES[0], "attention_mask": torch.ones_like(BATCHES[0])}
    padded = {name: torch.nn.functional.pad(t, (0, 16)) for name, t in short.items()}
    models = [AutoModel.from_pretrained(tmp_path / "m", dtype=torch.float32) for _ in range(2)]
    for model, batch in zip(models, (short, padded), strict=True):
        assert quantize(model, "mixed:four=0.25,outliers=0.002", [batch]).matrices == 12
    with torch.no_grad():
        a, b = (m(tokens()).last_hidden_state for m in models)
        assert error(a, b) < 1e-3
        models[0].save_pretrained(tmp_path / "q")
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "q")(tokens()).last_hidden_state, a)


def test_inputs_of_a_block_are_those_that_the_model_gives_it(tmp_path: Path) -> None:
    """Also after an earlier block has changed."""
    model = load(write_model("llama", tmp_path / "m"))
    model.config.use_cache = False
    names = ["model.layers.0", "model.layers.1"]
    calls = [{"input_ids": x} for x in BATCHES]
    inputs = BlockInputs(model, names, calls)
    inputs.of(names[0])
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    for made, batch in zip(inputs.of(names[1]), calls, strict=True):
        seen = calls_of(model, names[1], Call((), dict(batch)))[0]
        assert torch.equal(made.args[0], seen.args[0])


class Interruption:
    """Raises KeyboardInterrupt when it is called for the n-th time, as Ctrl-C would."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *_: object, **__: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def state(model: Any) -> dict[str, Any]:
    """What an interruption must leave alone, but for the values of tensors."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return {
        "modules": [
            (name, type(m), m.training, [len(getattr(m, h)) for h in hooks]) for name, m in model.named_modules()
        ],
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "tied": dict(model.all_tied_weights_keys),
        "model": (sorted(model.__dict__), model.config.use_cache, hasattr(model.config, "quantization_config")),
    }


@pytest.mark.parametrize(
    "moment", ["without data", "between stages", "in a forward pass", "in a product", "at the end"]
)
@pytest.mark.parametrize("scheme", ["gptq:bits=3,group=32", "atom:w=4,a=4,group=16,outliers=16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.sample(6)
def test_an_interruption_leaves_the_model_as_it_was(
    family: str, scheme: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks, weights and modules; the next call then quantizes the original."""
    model, other = load(path := write_model(family, tmp_path / "m")), load(path)
    embedding = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding))
    overrides = {embedding: "rtn:bits=8,group=32"}
    model.train()
    model.get_submodule(embedding).eval()
    want, was = state(model), {n: t.clone() for n, t in model.state_dict().items()}
    progress = None
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    linear = next(m for n, m in linears.items() if ".1." in n)  # the first of the second layer
    if moment in ("without data", "between stages"):
        progress = Interruption(1 if moment == "without data" else 7)
    elif moment == "in a forward pass":
        raising = linear.register_forward_pre_hook(Interruption(5))
    elif moment == "in a product":
        stop, forward = Interruption(5), type(linear).forward
        monkeypatch.setattr(type(linear), "forward", lambda m, x: (stop() if m is linear else None, forward(m, x))[1])
    else:
        stop, placed = Interruption(4), calibration.swap
        monkeypatch.setattr(calibration, "swap", lambda *args: (placed(*args), stop())[0])
    with pytest.raises(KeyboardInterrupt):
        quantize(model, scheme, BATCHES, overrides=overrides, progress=progress)
    if moment == "in a forward pass":
        raising.remove()
    monkeypatch.undo()
    assert state(model) == want
    now = model.state_dict()
    assert now.keys() == was.keys()
    assert all(torch.equal(now[n], was[n]) for n in was)
    quantize(model, scheme, BATCHES, overrides=overrides)
    quantize(other, scheme, BATCHES, overrides=overrides)
    assert torch.equal(logits(model.eval()), logits(other))


def test_a_layer_that_cannot_be_replaced_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Doubling(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = load(write_model("llama", tmp_path / "m"))
    model.model.layers[1].mlp.up_proj.__class__ = Doubling
    want, before = state(model), logits(model)
    with pytest.raises(UnsupportedError, match="does more than a linear layer"):
        quantize(model, "rtn:bits=4,group=32")
    assert state(model) == want
    assert torch.equal(logits(model), before)


def test_refusals(tmp_path: Path) -> None:
    model = load(write_model("llama", tmp_path / "m"))
    with pytest.raises(SchemeError, match="use guidance=0"):
        quantize(model, "gptq:bits=3,group=32,guidance=0.5", BATCHES)
    for scheme in ("awq:bits=4,group=32", "auto:bits=3.5", "mixed:four=0.25,tune=short"):
        with pytest.raises(SchemeError, match="use `crelle quantize` for families"):
            quantize(model, scheme, BATCHES)
    with pytest.raises(SchemeError, match="give quantize"):
        quantize(model, "gptq:bits=3,group=32")
    quantize(model, "rtn:bits=4,group=32")
    with pytest.raises(SchemeError, match="quantized already"):
        quantize(model, "rtn:bits=4,group=32")
    with pytest.raises(UnsupportedError, match="holds experts"):
        quantize(load(write_model("qwen3_moe", tmp_path / "e")), "gptq:bits=3,group=16", BATCHES)


def test_command_line_on_a_family_that_only_transformers_runs(crelle: Any, tmp_path: Path) -> None:
    """Schemes without data write a checkpoint; for others the error has the lines to run, which do what they say."""
    source, out = write_model("phi", tmp_path / "m"), tmp_path / "calibrated"
    assert crelle("quantize", source, tmp_path / "rounded", "--scheme", "rtn:bits=4,group=32").returncode == 0
    assert torch.isfinite(logits(load(tmp_path / "rounded"))).all()
    done = crelle("quantize", source, out, "--scheme", "gptq:bits=4,group=32")
    assert done.returncode != 0
    assert "'phi' is not one that Crelle runs" in done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("    ")]
    exec("\n".join(lines), {})
    assert torch.isfinite(logits(load(out))).all()
    assert (out / "tokenizer.json").is_file()
