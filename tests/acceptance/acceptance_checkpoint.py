"""A checkpoint of a real shape on disk, with random weights: written in its quantized form, one layer at a time.

It has a tokenizer of its own: a byte is a token, so a prompt has as many tokens as characters and one more. All other
ids are words that no text is encoded to, " w00300" for 300, so that every answer of a random model can be read back.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch

from crelle.bench.model_shapes import RandomWeights, config_of, llama_config
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name

TINY = llama_config(128, 2, 4, 256, kv_heads=2, vocabulary=1024, context=512)
SPECIAL = ("<|bos|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_checkpoint(to: Path, shape: str, scheme: str, device: str, layers: int | None = None) -> None:
    """Write a checkpoint as `crelle quantize` leaves one; shape: a name of SHAPES, or tiny."""
    config = dict(TINY) if shape == "tiny" else config_of(shape)
    config |= {"bos_token_id": 256, "eos_token_id": 258}
    weights = RandomWeights(config, scheme, device, layers=layers)
    shards: dict[str, list[str]] = defaultdict(list)  # by the layer's number; "": outside of layers
    for name in weights.names():
        shards[next((part for part in name.split(".") if part.isdigit()), "")].append(name)
    with CheckpointWriter(to, {"random": shape, "scheme": scheme}) as writer:
        for i, names in enumerate(shards.values(), 1):
            modules = [n.removesuffix(".weight") for n in names if len(weights.shape(n)) == 2]
            matrices = {module: weights.matrix(module).to("cpu") for module in modules}
            others = {n: weights.read(n).cpu() for n in names if n.removesuffix(".weight") not in matrices}
            writer.add(shard_name(i, len(shards)), matrices, others)
        write_tokenizer(writer.partial, config["vocab_size"])
        writer.finish(weights.config, scheme, {})
    if device == "cuda":
        torch.cuda.empty_cache()  # what is free is the server's


def write_tokenizer(to: Path, vocabulary: int) -> None:
    """Write a byte-level tokenizer without merges, with words for all ids behind the bytes and special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    first = len(ids) + len(SPECIAL)
    ids |= {token: len(ids) + i for i, token in enumerate(SPECIAL)}
    ids |= {f"Ġw{i:05}": i for i in range(first, vocabulary)}  # Ġ: how such tokenizers write a space
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    tokenizer.save(str(to / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    (to / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
