"""EXL3 directories: codes and factors as they are, weights as exllamav3's kernels compute them; bad files."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from crelle import LLM, Sampling, quantize
from crelle.errors import CrelleError, FormatError
from crelle.formats.exl3 import CODES, Exl3Tensor
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.storage.open import open_weights

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def random(N: int, K: int, bits: int, code: str, seed: int = 0) -> Exl3Tensor:
    spec = {"shape": [N, K], "bits": bits, "code": code}
    return Exl3Tensor.random(spec, torch.Generator().manual_seed(seed))


def half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])


def rounded(value: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def by_hand(q: Exl3Tensor, n: int, k: int) -> float:
    """A weight between the rotations, bit by bit as the layout says."""
    words = [w & 0xFFFF for w in q.trellis[k // 16, n // 16].tolist()]
    ring = "".join(f"{words[i + 1]:016b}{words[i]:016b}" for i in range(0, len(words), 2))
    k, n = k % 16, n % 16
    lane = 4 * (n % 8) + k % 8 // 2
    i = 8 * lane + 4 * (n // 8) + 2 * (k // 8) + k % 2
    end = (i + 1) * q.bits + len(ring)
    state = int((ring + ring)[end - 16 : end], 2)
    multiplier, addend = CODES[q.code]
    x = (state * multiplier + addend) & 0xFFFFFFFF
    if q.code == "mul1":
        return rounded((1024 + sum(x.to_bytes(4, "little"))) * half(0x1EEE) + half(0xC931))
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return rounded(half(x) + half(x >> 16))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_weights_are_those_of_the_layout(code: str, bits: int) -> None:
    q = random(128, 256, bits, code)
    w = q.weights()
    for n, k in ((0, 0), (0, 1), (0, 2), (1, 0), (8, 0), (0, 8), (7, 15), (15, 9), (127, 255), (100, 37), (16, 16)):
        assert float(w[n, k]) == by_hand(q, n, k)
    assert abs(float(q.dequantize().std()) * 16 - 1) < 0.1, "random ones have the size of weights"


def test_both_sides_are_rotated_in_blocks_of_128() -> None:
    q = random(128, 256, 3, "mcg")
    factors = torch.randn(256, generator=torch.Generator().manual_seed(1)).half()
    q = Exl3Tensor(q.trellis, factors, torch.rand(128, generator=torch.Generator().manual_seed(2)).half(), q.code)
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < 128:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    H /= 128**0.5
    w = H @ q.weights().double() @ torch.block_diag(H, H) * q.suh.double() * q.svh.double().unsqueeze(1)
    assert torch.allclose(q.dequantize(torch.float64), w, atol=1e-12)
    assert torch.equal(q.rows(torch.tensor([5, 77])).dequantize(), q.dequantize()[[5, 77]])
    two = random(256, 256, 2, "mul1")
    assert torch.allclose(two.rows(slice(128, 256)).dequantize(), two.dequantize()[128:], atol=1e-6)
    assert torch.allclose(two.columns(128, 256).dequantize(), two.dequantize()[:, 128:], atol=1e-6)
    assert two.cut(64) == "128 inputs are rotated together"


def write_exl3(to: Path, *, packed_signs: bool = False, code: str = "mul1") -> dict[str, Exl3Tensor]:
    """Write a small model as exllamav3 does; return its matrices."""
    write_tiny_model(to, **SIZES)
    tensors, made = load_file(to / "model.safetensors"), {}
    for seed, name in enumerate([n for n, t in tensors.items() if ".layers." in n and t.dim() == 2]):
        N, K = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        q = made[module] = random(N, K, 2 + seed % 3, code, seed)
        own: dict[str, Tensor] = {"trellis": q.trellis}
        if packed_signs:
            q = made[module] = Exl3Tensor(q.trellis, q.suh, torch.ones(N).half(), code)
            bits = (q.suh < 0).int().view(-1, 16) << torch.arange(16)
            own |= {"su": bits.sum(1).to(torch.int16), "sv": torch.zeros(N // 16, dtype=torch.int16)}
        else:
            own |= {"suh": q.suh, "svh": q.svh}
        if code != "3inst":
            own[code] = torch.tensor(1, dtype=torch.int32)
        tensors |= {f"{module}.{part}": t for part, t in own.items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "version": "0.0.6", "bits": 3.0, "head_bits": 16}
    (to / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize(("packed_signs", "code"), [(False, "mul1"), (False, "mcg"), (True, "3inst")])
def test_a_model_is_read_kept_and_run(packed_signs: bool, code: str, tmp_path: Path) -> None:
    made = write_exl3(tmp_path / "m", packed_signs=packed_signs, code=code)
    weights = open_weights(tmp_path / "m")
    for module, q in made.items():
        read = weights.matrix(module)
        assert read.spec() == q.spec()
        assert all(torch.equal(t, q.tensors()[name]) for name, t in read.tensors().items())
    kept = quantize(tmp_path / "m", tmp_path / "kept", "keep", device="cpu").out
    answers = [LLM.load(p, device="cpu").generate("Hello", Sampling(max_tokens=8)) for p in (tmp_path / "m", kept)]
    assert answers[0].tokens == answers[1].tokens
    with pytest.raises(CrelleError, match="exl3"):
        export_directory(open_weights(kept), tmp_path / "x", GPTQLayout())


def change(file: Path, name: str, value: Tensor | None) -> None:
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors if value is None else tensors | {name: value}, file, {"format": "pt"})


AT = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("part", "value", "sentence"),
    [
        ("suh", torch.ones(127).half(), r"'suh' should be float16 \[128\], but is float16 \[127\]"),
        ("svh", None, "the tensor 'sv' is missing"),
        ("trellis", torch.zeros(8, 16, dtype=torch.int16), "'trellis' should have three dimensions"),
        ("trellis", torch.zeros(8, 16, 144, dtype=torch.int16), "'bits' should be 1 to 8, but is 9"),
        ("trellis", torch.zeros(8, 16, 35, dtype=torch.int16), r"'trellis' should be int16 \[8, 16, 32\]"),
    ],
)
def test_damaged_files_get_a_sentence(part: str, value: Tensor | None, sentence: str, tmp_path: Path) -> None:
    write_exl3(tmp_path)
    change(tmp_path / "model.safetensors", f"{AT}.{part}", value)
    with pytest.raises(FormatError, match=sentence):
        open_weights(tmp_path).matrix(AT)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("shape", [240, 128], "a matrix of 240 x 128 is not made of blocks of 128"),
        ("code", "hyb", "'code' should be one of 3inst, mcg, mul1, but is 'hyb'"),
        ("bits", 2.0, "'bits' should be 1 to 8"),
        ("shape", [2**30, 128], r"'trellis' should be int16 \[8, 67108864, 32\]"),
    ],
)
def test_bad_specs_get_a_sentence(key: str, value: Any, sentence: str) -> None:
    q = random(256, 128, 2, "mul1")
    with pytest.raises(FormatError, match=sentence):
        Exl3Tensor.from_parts({**q.spec(), key: value}, q.tensors())
