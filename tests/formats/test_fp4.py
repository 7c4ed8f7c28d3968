"""Four-bit floats: the nearest codes, steps, files of others bit for bit, products."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import write_tokenizer
from gpt_oss import write_gpt_oss
from safetensors.torch import load_file, save_file
from torch import Tensor

from crelle import LLM, Sampling, quantize
from crelle.errors import CrelleError, FormatError, SchemeError, UnsupportedError
from crelle.formats.base import bits_per_weight
from crelle.formats.exporters.compressed_tensors import CompressedTensorsLayout
from crelle.formats.exporters.directory import export_directory
from crelle.formats.fp4 import E4M3, LEVELS, Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor
from crelle.formats.parallel import columns
from crelle.formats.storage.open import open_weights
from crelle.kernels import ops
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.reference import matmul_fp64
from crelle.models.loader import load
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.fp4 import nearest, packed, values

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
    "head_dim": 16,
}
SCHEMES = {"mxfp4": Mxfp4Tensor, "nvfp4": Nvfp4Tensor}


def test_nearest_is_the_nearest_value_and_ties_go_to_even_codes() -> None:
    w = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5])])
    codes = nearest(w)
    levels = values(torch.arange(16)).double()
    distance = (w.double()[:, None] - levels).abs()
    assert torch.equal((w.double() - values(codes).double()).abs(), distance.amin(1))
    ties = (distance == distance.amin(1, keepdim=True)).sum(1) > 1 + (values(codes) == 0)  # 0 has two codes
    assert ties.sum() >= 7
    assert (codes[ties] % 2 == 0).all()
    assert values(torch.arange(16)).tolist() == [*LEVELS, *(-level for level in LEVELS)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64, 256), (5, 83)])
def test_quantized_matrices(scheme: str, shape: tuple[int, int]) -> None:
    """Close to the weights; the grid of integers has the same values; parts make the same matrix again."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    q = parse(scheme).fit(weight)
    assert isinstance(q, SCHEMES[scheme])
    assert (q.dequantize() - weight).norm() < 0.13 * weight.norm()
    assert not q.dequantize()[0].any()
    assert torch.equal(q.as_uniform().dequantize(), q.dequantize())
    again = type(q).from_parts(q.spec(), q.tensors())
    assert torch.equal(again.dequantize(torch.float64), q.dequantize(torch.float64))
    assert torch.equal(packed(q.codes()), q.packed)
    if shape == (64, 256):
        assert bits_per_weight(q) == pytest.approx({"mxfp4": 4.25, "nvfp4": 4.5}[scheme], abs=0.01)
    again = parse(scheme).fit(q.dequantize())
    assert torch.equal(again.dequantize(), q.dequantize()) or scheme == "nvfp4"  # whose scales depend on the matrix


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_cpu_kernel_against_f64(scheme: str, rows: int) -> None:
    g = torch.Generator().manual_seed(2)
    q = SCHEMES[scheme].random(parse(scheme).storage((96, 320)), g)  # type: ignore[attr-defined]
    assert float(q.dequantize().std()) == pytest.approx(320**-0.5, rel=0.1)
    x = torch.randn(rows, 320, generator=g)
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        w = ops.prepare(q, dtype)
        assert w.kernel.name == "cpu"
        want = matmul_fp64(x.to(dtype), q)
        assert (ops.matmul(x.to(dtype), w) - want).abs().max() < most * want.abs().max()


def write_llama(to: Path) -> Path:
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


def logits(path: Path, n: int = 40) -> Tensor:
    model, _ = load(path, device="cpu")
    ids = torch.randint(250, (1, n), generator=torch.Generator().manual_seed(3))
    return model(ids, model.new_cache())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_is_quantized_exported_and_read_again_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    made = quantize(write_llama(tmp_path / "m"), tmp_path / "q", scheme, device="cpu").out
    model, weights = load(made, device="cpu")
    assert isinstance(model.decoder, FusedDecoder)
    assert (logits(made) - logits(tmp_path / "m")).norm() < 0.4 * logits(tmp_path / "m").norm()
    said = export_directory(weights, tmp_path / "ct", CompressedTensorsLayout())
    assert said["format"] == f"{scheme}-pack-quantized"
    theirs = open_weights(tmp_path / "ct")
    for module, spec in weights.specs.items():  # type: ignore[attr-defined]
        if spec["format"] == scheme:
            ours, read = weights.matrix(module), theirs.matrix(module)
            assert ours.spec() == read.spec()
            for name, t in ours.tensors().items():
                assert torch.equal(t.view(torch.uint8), read.tensors()[name].view(torch.uint8))
    quantize(tmp_path / "ct", tmp_path / "kept", "keep", device="cpu")
    assert torch.equal(logits(tmp_path / "kept"), logits(made))
    llm = LLM.load(tmp_path / "ct", device="cpu")
    assert len(llm.generate("Hello", Sampling(max_tokens=5)).tokens) > 0


def test_nvfp4_of_modelopt_is_read_bit_for_bit(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    made: dict[str, Tensor] = {}
    want: dict[str, Tensor] = {}
    g = torch.Generator().manual_seed(5)
    for name, t in tensors.items():
        if ".layers." not in name or t.dim() != 2:
            made[name] = t
            continue
        module, (N, K) = name.removesuffix(".weight"), t.shape
        codes = torch.randint(256, (N, K // 2), generator=g, dtype=torch.uint8)
        scale = (torch.rand(N, K // 16, generator=g) * 200).to(E4M3)
        whole = torch.tensor(2e-4)
        made |= {name: codes, f"{module}.weight_scale": scale, f"{module}.weight_scale_2": whole}
        made[f"{module}.input_scale"] = torch.tensor(0.5)
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        want[module] = values(both) * (scale.float() * whole).repeat_interleave(16, 1)
    save_file(made, source / "model.safetensors")
    algorithm = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (source / "hf_quant_config.json").write_text(json.dumps(algorithm))
    weights = open_weights(source)
    for module, w in want.items():
        assert torch.equal(weights.matrix(module).dequantize(), w)
        assert torch.equal(weights.matrix(module).tensors()["codes"], made[f"{module}.weight"])
    assert logits(source).isfinite().all()
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CrelleError, match="quantized by ModelOpt's 'FP8'; Crelle reads NVFP4"):
        open_weights(source)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


def test_experts_of_gpt_oss_are_read_bit_for_bit(gpt_oss: Path, tmp_path: Path) -> None:
    """As transformers dequantizes them; kept, the checkpoint has the same codes, and the same logits."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, weights = load_file(gpt_oss / "model.safetensors"), open_weights(gpt_oss)
    at = "model.layers.0.mlp.experts"
    for kind, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        blocks, scales = (tensors[f"{at}.{kind}_{end}"] for end in ("blocks", "scales"))
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, K, N]
        for e in range(3):
            for i, part in enumerate(parts):
                w = weights.matrix(f"{at}.{e}.{part}")
                assert isinstance(w, Mxfp4Tensor)
                assert torch.equal(w.dequantize(), whole[e].T[i :: len(parts)])
                assert torch.equal(w.packed, blocks[e].flatten(1)[i :: len(parts)])
                assert torch.equal(w.scale, scales[e][i :: len(parts)])
    made = quantize(gpt_oss, tmp_path / "kept", "keep", device="cpu").out
    kept = open_weights(made)
    assert torch.equal(
        kept.matrix(f"{at}.1.up_proj").tensors()["codes"], weights.matrix(f"{at}.1.up_proj").tensors()["codes"]
    )
    got = logits(gpt_oss)
    assert torch.equal(logits(made), got)
    plain = {n: t for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    for n, t in tensors.items():
        if n.endswith("_blocks"):
            name = n.removesuffix("_blocks")
            plain[name] = convert_moe_packed_tensors(t, tensors[f"{name}_scales"], dtype=torch.float32).contiguous()
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((gpt_oss / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(250, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(ids).logits
    assert (got - want).abs().max() < 1e-3 * want.abs().max()


def test_damaged_parts_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    q = parse("mxfp4").fit(torch.randn(4, 64))
    bad = q.scale.clone()  # type: ignore[attr-defined]
    bad[0, 0] = 255
    with pytest.raises(FormatError, match="a scale is 255"):
        Mxfp4Tensor.from_parts(q.spec(), q.tensors() | {"scale": bad})
    with pytest.raises(FormatError, match="4 bits in groups of 32, not 3"):
        Mxfp4Tensor.from_parts(q.spec() | {"bits": 3}, q.tensors())
    n = parse("nvfp4").fit(torch.randn(4, 64))
    with pytest.raises(FormatError, match="divided by a global scale of 0"):
        Nvfp4Tensor.from_parts(n.spec(), n.tensors() | {"global_scale": torch.zeros(1)})
    with pytest.raises(FormatError, match="'divides' should be true or false"):
        Nvfp4Tensor.from_parts(n.spec() | {"divides": 1}, n.tensors())
    with pytest.raises(SchemeError, match="mxfp4 has 4 bits in groups of 32"):
        parse("mxfp4:bits=3")
    tensors = load_file(gpt_oss / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((gpt_oss / "config.json").read_bytes())
    with pytest.raises(FormatError, match="are not the experts of gpt-oss"):
        open_weights(tmp_path)


def test_inputs_are_cut_between_groups() -> None:
    q = parse("mxfp4").fit(torch.randn(4, 96))
    assert isinstance(q, Fp4Tensor)
    half = columns(q, 32, 96)
    assert isinstance(half, Mxfp4Tensor)
    assert torch.equal(half.dequantize(), q.dequantize()[:, 32:])
    assert q.cut(16) == "that would split a group of 32 inputs"
    with pytest.raises(UnsupportedError, match="inputs 16 to 95 of 96 cannot be extracted: that would split a group"):
        columns(q, 16, 96)
