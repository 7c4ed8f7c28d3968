"""Models as GPTQ, AWQ and compressed-tensors store them, packed from the documented layouts with Python's integers.

Nothing of Crelle is used, so that a mistake in its packing cannot hide here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from conftest import TINY, write_tokenizer
from torch import Tensor

UP = "model.layers.0.mlp.up_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Grid:
    """A random matrix scale (q - zero) with the group of every input."""

    codes: Tensor  # [N, K]
    bits: int
    scale: Tensor  # [N, G]
    zero: Tensor  # [N, G]
    group: int
    g_idx: Tensor  # [K]

    def numbers(self) -> Tensor:
        """The f32 weights by the formula s (q - z)."""
        scale, zero = self.scale.float()[:, self.g_idx], self.zero.float()[:, self.g_idx]
        return scale * (self.codes.float() - zero)


def random_grid(
    N: int,
    K: int,
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    scattered: bool = False,
    lowest: int = 0,
    highest: int | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Grid:
    """Zero points are drawn from lowest ... highest (by default the codes' own range)."""
    random = torch.Generator().manual_seed(seed)
    group = K if group == -1 else group
    G = -(-K // group)
    codes = torch.randint(0, 2**bits, (N, K), generator=random)
    scale = (0.02 * torch.randn(N, G, generator=random).exp() / 2**bits).to(dtype)
    top = 2**bits - 1 if highest is None else highest
    zero = torch.randint(lowest, top + 1, (N, G), generator=random)
    if symmetric:
        zero = torch.full((N, G), 2 ** (bits - 1))
    g_idx = torch.arange(K) // group
    if scattered:
        g_idx = g_idx[torch.randperm(K, generator=random)]
    return Grid(codes, bits, scale, zero, group, g_idx)


def stream(codes: Tensor, bits: int, per_word: int | None = None) -> Tensor:
    """Pack rows of codes into int32, low bits first: one dense stream, or `per_word` codes in each word."""
    rows = []
    for row in codes.tolist():
        if per_word is None:
            value = sum(c << (i * bits) for i, c in enumerate(row))
            words = [(value >> at) & 0xFFFFFFFF for at in range(0, len(row) * bits, 32)]
        else:
            cut = [row[at : at + per_word] for at in range(0, len(row), per_word)]
            words = [sum(c << (i * bits) for i, c in enumerate(part)) for part in cut]
        rows.append([w - 2**32 if w >= 2**31 else w for w in words])
    return torch.tensor(rows, dtype=torch.int32)


def gptq(g: Grid, version: int = 2) -> dict[str, Tensor]:
    stored = g.zero - (1 if version == 1 else 0)
    return {
        "qweight": stream(g.codes, g.bits).T.contiguous(),
        "qzeros": stream(stored.T, g.bits),
        "scales": g.scale.T.contiguous(),
        "g_idx": g.g_idx.to(torch.int32),
    }


def _awq_words(codes: Tensor) -> Tensor:
    """[rows, N] to [rows, N/8] in AWQ's order of nibbles."""
    rows = [[row[8 * (i // 8) + AWQ_ORDER[i % 8]] for i in range(len(row))] for row in codes.tolist()]
    return stream(torch.tensor(rows), 4)


def awq_gemm(g: Grid) -> dict[str, Tensor]:
    words = {"qweight": _awq_words(g.codes.T), "qzeros": _awq_words(g.zero.T)}
    return {**words, "scales": g.scale.T.contiguous()}


def awq_gemv(g: Grid, padding: int = 8) -> dict[str, Tensor]:
    G = g.scale.shape[1]
    more = -G % padding
    zero, scale = (torch.nn.functional.pad(t, (0, more)) for t in (g.zero, g.scale))
    return {"qweight": stream(g.codes, 4), "qzeros": stream(zero, 4), "scales": scale}


def exl3(N: int, K: int, bits: int) -> dict[str, Tensor]:
    """Any codes are a ring of states."""
    tiles = torch.arange(K // 16 * (N // 16) * 16 * bits).mul(40503).to(torch.int16)
    parts = {"trellis": tiles.reshape(K // 16, N // 16, 16 * bits), "mul1": torch.tensor(1, dtype=torch.int32)}
    return {**parts, "suh": torch.ones(K).half(), "svh": torch.full((N,), 0.01).half()}


def compressed(g: Grid, *, symmetric: bool = False, dense: bool = True, g_idx: bool = False) -> dict[str, Tensor]:
    per_word = None if dense else 32 // g.bits
    parts = {
        "weight_packed": stream(g.codes, g.bits, per_word),
        "weight_scale": g.scale,
        "weight_shape": torch.tensor(g.codes.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = stream(g.zero.T, g.bits, per_word).T.contiguous()
    if g_idx:
        parts["weight_g_idx"] = g.g_idx.to(torch.int32)
    return parts


def compressed_config(bits: int, group: int, *, symmetric: bool = False, **weights: Any) -> dict[str, Any]:
    how = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    how |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**how, **weights}, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def write(to: Path, tensors: Mapping[str, Tensor], quantization: object, **config: Any) -> Path:
    to.mkdir(parents=True, exist_ok=True)
    held = {name: t.contiguous() for name, t in tensors.items()}
    safetensors.torch.save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps({**TINY, **config, "quantization_config": quantization}))
    return to


def one(to: Path, parts: Mapping[str, Tensor], quantization: object, module: str = UP) -> Path:
    """A directory with one matrix only."""
    return write(to, {f"{module}.{p}": t for p, t in parts.items()}, quantization)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def write_models(
    to: Path, pack: Callable[[Grid], Mapping[str, Tensor]], quantization: object, head: bool = False, **grid: Any
) -> tuple[Path, Path]:
    """Write a tiny Llama twice: with packed layers, and with the f32 numbers that these stand for."""
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    modules = {f"self_attn.{n}_proj": s for n, s in shapes.items()}
    modules |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
    random = torch.Generator().manual_seed(1)
    plain = {
        "model.embed_tokens.weight": torch.randn(259, 64, generator=random).half(),
        "model.norm.weight": torch.ones(64),
    }
    packed = {}
    for i in range(2):
        at = f"model.layers.{i}"
        for j, (name, (N, K)) in enumerate(modules.items()):
            g = random_grid(N, K, seed=100 * i + j, **grid)
            packed |= {f"{at}.{name}.{p}": t for p, t in pack(g).items()}
            plain[f"{at}.{name}.weight"] = g.numbers()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"{at}.{norm}.weight"] = 1 + 0.1 * torch.randn(64, generator=random)
    plain["lm_head.weight"] = torch.randn(259, 64, generator=random).half()
    coded = {n: t for n, t in plain.items() if not (n.startswith("model.layers") and "proj" in n)}
    sizes = {**SMALL, "num_hidden_layers": 2}
    theirs = write(to / "theirs", coded | packed, quantization, **sizes)
    ours = write(to / "plain", plain, None, **sizes)
    for directory in (theirs, ours):
        write_tokenizer(directory)
    return theirs, ours
