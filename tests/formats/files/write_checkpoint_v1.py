"""Writes checkpoint_v1/, a checkpoint of format version 1 with every weight format, and the hashes of its values.

It was run once, before anything that reads checkpoints was rewritten, and is kept to show what the bytes are. Whoever
changes the format raises the version and writes another directory: this one stays readable.

    python tests/formats/files/write_checkpoint_v1.py NEW_DIRECTORY
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor, NestedTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.storage.tokenizer_files import copy_tokenizer_files
from crelle.formats.wrappers.composite import PermutedTensor

HASHES = "hashes.json"
H, INNER, HEAD, HEADS, KV_HEADS, VOCABULARY = 24, 40, 8, 3, 1, 259
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write(to: Path) -> None:
    """Write the checkpoint: integers and powers of two from one generator, so that any machine writes the same."""
    random = torch.Generator().manual_seed(16)

    def codes(n: int, k: int, bits: int) -> Tensor:
        return torch.randint(0, 2**bits, (n, k), generator=random, dtype=torch.uint8)

    def scale(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return (torch.randint(1, 2000, shape, generator=random) / 2**14).to(dtype)

    def uniform(n: int, k: int, bits: int = 4, group: int = 8, zero: bool = True) -> UniformTensor:
        groups = -(-k // group)
        zeros = codes(n, groups, bits) if zero else None
        return UniformTensor.from_codes(codes(n, k, bits), bits, scale(n, groups), zeros, group)

    def bcq(n: int, k: int, bias: bool) -> BCQTensor:
        groups = -(-k // 16)
        z = scale(n, groups, dtype=torch.bfloat16) if bias else None
        return BCQTensor.from_codes(codes(n, k, 3), scale(3, n, groups, dtype=torch.bfloat16), z, 16)

    def affine(n: int, k: int) -> AffineTensor:
        groups = -(-k // 8)
        values = scale(n, groups, dtype=torch.float32), -scale(n, groups, dtype=torch.float32)
        return AffineTensor.from_codes(codes(n, k, 2), 2, *values, 8)

    def nested(n: int, k: int) -> NestedTensor:
        groups = -(-k // 12)
        return NestedTensor.from_codes(codes(n, k, 4), (2, 3, 4), scale(3, n, groups), -scale(3, n, groups), 12)

    def permuted(n: int, k: int) -> PermutedTensor:
        return PermutedTensor(uniform(n, k, bits=3), torch.randperm(k, generator=random).to(torch.int32))

    def dense(n: int, k: int, dtype: torch.dtype) -> DenseTensor:
        return DenseTensor(scale(n, k, dtype=dtype))

    layers: list[dict[str, QuantTensor]] = [
        {
            "self_attn.q_proj": bcq(HEADS * HEAD, H, bias=True),
            "self_attn.k_proj": bcq(KV_HEADS * HEAD, H, bias=False),
            "self_attn.v_proj": uniform(KV_HEADS * HEAD, H),
            "self_attn.o_proj": uniform(H, HEADS * HEAD, zero=False),
            "mlp.gate_proj": nested(INNER, H),
            "mlp.up_proj": permuted(INNER, H),
            "mlp.down_proj": affine(H, INNER),
        },
        {
            "self_attn.q_proj": permuted(HEADS * HEAD, H),
            "self_attn.k_proj": affine(KV_HEADS * HEAD, H),
            "self_attn.v_proj": nested(KV_HEADS * HEAD, H),
            "self_attn.o_proj": dense(H, HEADS * HEAD, torch.float16),
            "mlp.gate_proj": dense(INNER, H, torch.bfloat16),
            "mlp.up_proj": dense(INNER, H, torch.float32),
            "mlp.down_proj": uniform(H, INNER, bits=8, group=40, zero=False),
        },
    ]
    with CheckpointWriter(to, {"fixture": 1}) as writer:
        writer.add(shard_name(1, 4), {"model.embed_tokens": dense(VOCABULARY, H, torch.bfloat16)}, {})
        for i, layer in enumerate(layers):
            at = f"model.layers.{i}"
            norms = {
                f"{at}.{n}_layernorm.weight": 1 + scale(H, dtype=torch.float32) for n in ("input", "post_attention")
            }
            writer.add(shard_name(i + 2, 4), {f"{at}.{m}": w for m, w in layer.items()}, norms)
        writer.add(shard_name(4, 4), {"lm_head": uniform(VOCABULARY, H)}, {"model.norm.weight": torch.ones(H)})
        copy_tokenizer_files(Path(__file__).parents[1] / "earlier_checkpoint", writer.partial)
        writer.finish(CONFIG, "rtn:bits=4,group=8", {"*.q_proj": "bcq:bits=3,group=16"})


def hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of every tensor's values in f32, by name."""
    read = {name: checkpoint.read(name).float().contiguous() for name in sorted(checkpoint.names())}
    return {name: hashlib.sha256(w.numpy().astype("<f4").tobytes()).hexdigest() for name, w in read.items()}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write(out)
    (out / HASHES).write_text(json.dumps(hashes(Checkpoint(out)), indent=2) + "\n")
