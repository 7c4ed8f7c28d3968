"""What users of transformers do with a quantized model besides generating: gradients, LoRA, dequantize, resize."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from hf_models import FAMILIES, error, logits, tokens, write_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import crelle
from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.integrations.transformers.layers import CrelleLinear, QuantModule

TIGHT = 3e-4  # the CPU kernels round inputs to 16 bits or so
SCHEME = "rtn:bits=4,group=16"
DENSE = [f for f in FAMILIES if f not in ("qwen3_moe", "mixtral")]


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama")
    return crelle.quantize(write_model("llama", root / "m", tie_word_embeddings=False), root / "q", SCHEME).out


def loss(model: Any) -> Tensor:
    found: Tensor = model(tokens(), labels=tokens()).loss
    return found


@pytest.mark.parametrize(
    "scheme", [SCHEME, "bcq:bits=3,group=16", "mixed:four=0.25,outliers=0.002", "hbcq:bits=2,group=16"]
)
def test_the_gradient_to_the_input_is_that_of_the_dequantized_linear(scheme: str, tmp_path: Path) -> None:
    made = crelle.quantize(write_model("llama", tmp_path / "m"), tmp_path / "q", scheme).out
    linear = next(m for m in load(made).modules() if isinstance(m, CrelleLinear))
    x, dy = torch.randn(3, 5, linear.in_features, requires_grad=True), torch.randn(3, 5, linear.out_features)
    w = linear.quant_tensor().dequantize(torch.float64)
    (linear(x) * dy).sum().backward()
    assert x.grad is not None
    assert (x.grad - dy.double() @ w).abs().max() < 1e-5 * (dy.double() @ w).abs().max()


def lora(model: Any, targets: Any) -> Any:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, lora_dropout=0.0))


def losses(model: Any, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    found = []
    for _ in range(steps):
        step = loss(model)
        optimizer.zero_grad()
        step.backward()
        optimizer.step()
        found.append(float(step.detach()))
    return found


@pytest.mark.filterwarnings("ignore")  # of peft, about other packages
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_lora_lowers_the_loss_as_on_the_dequantized_model(targets: Any, llama: Path, tmp_path: Path) -> None:
    quantized, plain = load(llama), load(llama).dequantize()
    before = {n: b.clone() for n, b in quantized.named_buffers()}
    ours, theirs = lora(quantized, targets), lora(plain, targets)
    adapted = {n for n, _ in ours.named_modules() if n.endswith("lora_A")}
    assert adapted == {n for n, _ in theirs.named_modules() if n.endswith("lora_A")}
    assert len(adapted) == (4 if isinstance(targets, list) else 14)
    got, want = losses(ours), losses(theirs)
    assert want[-1] < 0.9 * want[0]
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 2e-3
    assert all(torch.equal(b, before[n]) for n, b in quantized.named_buffers() if n in before)
    ours.save_pretrained(tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    again = peft.PeftModel.from_pretrained(load(llama), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, ours(tokens()).logits)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_not_merged_into_codes(llama: Path) -> None:
    model = lora(load(llama), ["q_proj"])
    with pytest.raises(UnsupportedError, match="cannot be merged into a quantized matrix"):
        model.merge_and_unload()
    with pytest.raises(UnsupportedError, match="has an adapter"):
        model.get_base_model().dequantize()


@pytest.mark.filterwarnings("ignore")
def test_lora_reaches_the_parts_of_a_joined_linear(tmp_path: Path) -> None:
    """GPT-2's q, k and v are one linear in transformers; what stands in their places is looked up."""
    made = crelle.quantize(write_model("gpt2", tmp_path / "m"), tmp_path / "q", SCHEME).out
    model = lora(load(made), ["q_proj", "down_proj"])
    found = losses(model, 6)
    assert found[-1] < found[0]
    assert all(float(p.abs().max()) > 0 for n, p in model.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.sample(2)
def test_dequantize_gives_a_plain_model_with_the_same_logits(family: str, tmp_path: Path) -> None:
    made = crelle.quantize(write_model(family, tmp_path / "m"), tmp_path / "q", SCHEME, head=SCHEME).out
    model = load(made)
    want, count = logits(model), model.num_parameters()
    copied = copy.deepcopy(model).dequantize()
    assert not any(isinstance(m, QuantModule) for m in copied.modules())
    assert error(logits(copied), want) < TIGHT
    copied.save_pretrained(tmp_path / "plain")
    assert error(logits(load(tmp_path / "plain")), logits(copied)) < 1e-6
    original = load(tmp_path / "m")
    assert count == copied.num_parameters() == original.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == original.num_parameters(exclude_embeddings=True)
    assert torch.equal(logits(model), want)  # the original is as it was


def test_dequantize_refuses_experts(tmp_path: Path) -> None:
    made = crelle.quantize(write_model("mixtral", tmp_path / "m"), tmp_path / "q", SCHEME).out
    with pytest.raises(UnsupportedError, match="the experts at"):
        load(made).dequantize()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [None, SCHEME])
def test_resize_token_embeddings(tied: bool, head: str | None, tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "m", tie_word_embeddings=tied)
    made = crelle.quantize(source, tmp_path / "q", SCHEME, head=head).out
    model = load(made)
    want = logits(model)
    assert model.resize_token_embeddings() is model.get_input_embeddings()  # nothing asked for, nothing changed
    model.resize_token_embeddings(262, mean_resizing=False)
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (262, 64)
    assert error(logits(model)[..., :259], want) < TIGHT
    model.save_pretrained(tmp_path / "s")
    assert error(logits(load(tmp_path / "s")), logits(model)) < 1e-6
    assert any(spec["format"] == "uniform" for spec in Checkpoint(tmp_path / "s").specs.values())


def test_a_frozen_model_has_no_trainable_parameters_in_its_codes(llama: Path) -> None:
    model = load(llama)
    assert model.num_parameters(only_trainable=True) < model.num_parameters() / 2
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_the_example_trains_saves_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import qlora

    found = qlora.main(steps=10)
    assert found[-1] < 0.95 * found[0]


def test_an_adapter_by_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match="is an adapter"):
        crelle.LLM.load(tmp_path)
