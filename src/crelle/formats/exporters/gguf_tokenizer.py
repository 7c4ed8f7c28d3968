"""A tokenizer.json as the metadata of a GGUF file: the inverse of crelle.formats.importers.gguf_tokenizer.

Byte-level BPE (`gpt2`) goes out with its merges and the name of its splitting rule: the rule must be one that has a
name. SentencePiece BPE (`llama`) goes out with scores, by which llama.cpp chooses merges: those must be all that the
vocabulary allows, in an order that scores can give.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.importers.gguf_tokenizer import PRE_TOKENIZERS, byte_level, merges_of_scores
from crelle.formats.storage.io import parse_json, read_bounded
from crelle.formats.storage.open import Weights

_MAX_BYTES = 128 << 20
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # token types in GGUF
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass
class TokenizerMetadata:
    """What goes under `tokenizer.`: keys without that prefix."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)  # of special tokens, by GGUF's names
    flags: dict[str, bool] = field(default_factory=dict)
    chat_template: str | None = None


def tokenizer_metadata(weights: Weights, rows: int) -> TokenizerMetadata:
    """Return a model's tokenizer for an embedding of so many rows."""
    with tempfile.TemporaryDirectory() as made:
        weights.copy_tokenizer(Path(made))
        if not (Path(made) / "tokenizer.json").is_file():
            raise UnsupportedError(f"{weights.path} has no tokenizer.json, which GGUF export needs")
        try:
            tokenizer = parse_json(read_bounded(Path(made) / "tokenizer.json", _MAX_BYTES), "tokenizer.json")
            said = {}
            if (Path(made) / "tokenizer_config.json").is_file():
                said = parse_json(read_bounded(Path(made) / "tokenizer_config.json", _MAX_BYTES), "its config")
            if (Path(made) / "chat_template.jinja").is_file():
                said["chat_template"] = read_bounded(Path(made) / "chat_template.jinja", _MAX_BYTES).decode()
            return _metadata(tokenizer, said, weights.config, rows)
        except CrelleError as e:
            raise type(e)(f"{weights.path}: {e}") from e
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as e:
            raise FormatError(f"{weights.path}: its tokenizer.json is inconsistent ({e!r})") from e


def _metadata(t: Mapping[str, Any], said: Mapping[str, Any], config: Mapping[str, Any], rows: int) -> TokenizerMetadata:
    model, added = t["model"], t.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(f"its tokenizer is '{model['type']}', but GGUF export supports only BPE")
    vocab: dict[str, int] = model["vocab"]
    by_id = {i: token for token, i in vocab.items()} | {a["id"]: a["content"] for a in added}
    twice = next((i for token, i in vocab.items() if by_id[i] != token), None)
    if twice is not None:
        raise FormatError(f"its tokenizer has two tokens with the same id: {twice}")
    if (most := max(by_id) + 1) > rows:
        raise UnsupportedError(
            f"its tokenizer has {most} tokens, but its embedding has {rows} rows; GGUF needs one row per token"
        )
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    types = [_NORMAL if i in by_id else _UNUSED for i in range(rows)]
    for a in added:
        types[a["id"]] = _CONTROL if a["special"] else _USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if not merges:
        raise UnsupportedError("its tokenizer has no merges, which GGUF export needs")
    if model.get("byte_fallback"):
        found = TokenizerMetadata("llama", "default", tokens, types, scores=_scores(vocab, merges, rows))
        found.flags["add_space_prefix"] = _space_prefix(t)
        for i, token in enumerate(tokens):
            if types[i] == _NORMAL and len(token) == 6 and token.startswith("<0x"):
                types[i] = _BYTE
    else:
        found = TokenizerMetadata("gpt2", _pre_tokenizer(t), tokens, types, merges=merges)
    ids = {token: i for i, token in by_id.items()}
    _add_special(found, ids, said, config, model.get("unk_token"))
    if found.model == "llama" and (unknown := found.ids.get("unknown")) is not None:
        types[unknown] = _UNKNOWN
    start, end = _template(t.get("post_processor"))
    found.flags["add_bos_token"] = start is not None and ids.get(start) == found.ids.get("bos")
    found.flags["add_eos_token"] = end is not None and ids.get(end) == found.ids.get("eos")
    if (start and not found.flags["add_bos_token"]) or (end and not found.flags["add_eos_token"]):
        raise UnsupportedError(
            "its tokenizer adds other tokens than BOS and EOS to a text, which GGUF cannot represent"
        )
    found.chat_template = _chat_template(said.get("chat_template"))
    return found


def _pre_tokenizer(t: Mapping[str, Any]) -> str:
    """Return the name of the splitting rule: the known one that is built the same."""

    def rule(of: Mapping[str, Any]) -> str:
        kept = [of.get("normalizer"), of.get("pre_tokenizer"), bool(of["model"].get("ignore_merges"))]
        return json.dumps(kept, sort_keys=True).replace('"trim_offsets": false', '"trim_offsets": true')

    for name in PRE_TOKENIZERS:
        if rule(json.loads(byte_level([], [], name).to_str())) == rule(t):
            return name
    known = ", ".join(PRE_TOKENIZERS)
    raise UnsupportedError(f"its tokenizer splits text by a rule that GGUF does not have; known rules: {known}")


def _scores(vocab: Mapping[str, int], merges: list[str], rows: int) -> list[float]:
    """Return scores that put merges into their order: the earlier a token is made, the higher its score."""
    pairs = [(a, b) for a, _, b in (m.partition(" ") for m in merges)]
    made = list(dict.fromkeys(a + b for a, b in pairs))
    scores = [0.0] * rows
    for i, token in enumerate(made):
        scores[vocab[token]] = -float(i + 1)
    runs = sum(a != b for a, b in zip(["", *map("".join, pairs)], map("".join, pairs), strict=False))
    possible = set(merges_of_scores(dict(vocab), scores))
    if runs != len(made) or set(pairs) != possible:
        raise UnsupportedError("its tokenizer's merges cannot be expressed as scores, which GGUF uses instead")
    return scores


def _space_prefix(t: Mapping[str, Any]) -> bool:
    """Tell whether a text gets a space before it, by either way of writing SentencePiece's spaces."""
    normalizer, splitter = t.get("normalizer"), t.get("pre_tokenizer")
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if splitter is None and steps[-1] == replace and len(steps) <= 2:
        if len(steps) == 1:
            return False
        if steps[0] == {"type": "Prepend", "prepend": "▁"}:
            return True
    if normalizer is None and splitter and splitter["type"] == "Metaspace" and not splitter.get("split", True):
        return bool(splitter.get("prepend_scheme", "always") != "never")
    raise UnsupportedError("its tokenizer treats spaces in a way that GGUF cannot represent")


def _add_special(
    found: TokenizerMetadata,
    ids: Mapping[str, int],
    said: Mapping[str, Any],
    config: Mapping[str, Any],
    unknown: str | None,
) -> None:
    """Find the special tokens by name in the tokenizer's config, else by id in the model's."""
    for short, name in _SPECIAL.items():
        token = said.get(f"{short}_token") or (unknown if short == "unk" else None)
        token = token["content"] if isinstance(token, dict) else token
        i = config.get(f"{short}_token_id") if token is None else ids.get(token)
        i = i[0] if isinstance(i, list) and i else i
        if isinstance(i, int) and 0 <= i < len(found.tokens):
            found.ids[name] = i


def _template(post: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """Return the tokens that a text gets before and after it."""
    steps = (post["processors"] if post["type"] == "Sequence" else [post]) if post else []
    for step in steps:
        if step["type"] == "ByteLevel":
            continue
        if step["type"] != "TemplateProcessing":
            raise UnsupportedError(f"its tokenizer has a post-processor '{step['type']}', which GGUF cannot represent")
        names = [piece["SpecialToken"]["id"] if "SpecialToken" in piece else None for piece in step["single"]]
        at = names.index(None)
        if at > 1 or len(names) - at > 2:
            raise UnsupportedError("its tokenizer adds several tokens to a text, which GGUF cannot represent")
        return names[0], names[-1]
    return None, None


def _chat_template(said: Any) -> str | None:
    if isinstance(said, list):
        said = next((entry["template"] for entry in said if entry.get("name") == "default"), None)
    return said if isinstance(said, str) else None
