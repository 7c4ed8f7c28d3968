"""The tokenizer inside a GGUF file, written as tokenizer.json + tokenizer_config.json.

Two families: byte-level BPE (`gpt2`: Llama 3, Qwen, SmolLM; vocabulary and merges are in the file, the splitting rule
is only named there) and SentencePiece BPE (`llama`: Llama 1 and 2, Mistral, Gemma; the merges follow from the
scores).
"""

from pathlib import Path
from typing import Any

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.importers.gguf_metadata import Metadata
from crelle.formats.storage.io import to_json, write_whole
from crelle.formats.storage.rust import panics_are

_MAX_TOKEN = 2048  # characters; merges of a token take time and memory with the square of its length
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types in GGUF
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}

PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)  # the splitting rules that are known by name


def write_tokenizer(file: Metadata, to: Path) -> None:
    """Write the file's tokenizer into a directory, in the form that transformers loads."""
    try:
        with panics_are(f"{file.path}: its tokenizer is inconsistent"):
            tokenizer, config = build_tokenizer(file)
    except CrelleError:
        raise
    except Exception as e:  # the tokenizers library raises bare Exception, and metadata may be of any type
        raise FormatError(f"{file.path}: its tokenizer is inconsistent ({e})") from e
    write_whole(to / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_whole(to / "tokenizer_config.json", to_json(config))


def build_tokenizer(file: Metadata) -> tuple[Any, dict[str, Any]]:
    """Return the file's tokenizer and its tokenizer_config; what does not fit raises any Exception."""
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, str) and len(t) <= _MAX_TOKEN for t in tokens):
        raise FormatError(f"{file.path}: its tokens should be strings of at most {_MAX_TOKEN} characters")
    kinds: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    model = file.get("tokenizer.ggml.model")
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(f"{file.path} has a '{model}' tokenizer; Crelle reads 'gpt2' and 'llama' from GGUF")
    if model == "gpt2":
        tokenizer = byte_level(tokens, file.get("tokenizer.ggml.merges"), pre)
    else:
        tokenizer = _sentencepiece(file, tokens)
    _add_special(tokenizer, tokens, kinds)
    named = _special_names(file, tokens)
    bos = file.get("tokenizer.ggml.add_bos_token", model == "llama" or pre == "llama-bpe")
    if bos and "bos_token" in named:
        _prepend(tokenizer, named["bos_token"], tokens.index(named["bos_token"]))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": bool(bos),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.of_arch("context_length"),
    }
    if "tokenizer.chat_template" in file.fields:
        config["chat_template"] = file.get("tokenizer.chat_template")
    return tokenizer, config


def byte_level(tokens: list[str], merges: list[str], pre: str) -> Any:
    """Return a byte-level BPE tokenizer with the splitting rule that llama.cpp calls `pre`."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(a, b) for a, _, b in (m.partition(" ") for m in merges)]
    whole_words = pre == "llama-bpe"  # Llama 3 takes a word that is a token whole, whether merges lead to it or not
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=whole_words))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(f"unknown pre-tokenizer '{pre}'; known ones: {known}")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: Metadata, tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = file.get("tokenizer.ggml.scores")
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    vocab = {t: i for i, t in enumerate(tokens)}
    pairs = merges_of_scores(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def merges_of_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; list all pairs in that order."""
    found = []
    for token, i in vocab.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                found.append((-scores[i], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special(tokenizer: Any, tokens: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    special = [
        AddedToken(t, special=True, normalized=False)
        for t, k in zip(tokens, kinds, strict=True)
        if k in (_UNKNOWN, _CONTROL)
    ]
    plain = [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _special_names(file: Metadata, tokens: list[str]) -> dict[str, str]:
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: file.get(f"tokenizer.ggml.{key}_token_id", -1) for name, key in ids.items()}
    return {name: tokens[i] for name, i in found.items() if 0 <= i < len(tokens)}


def _prepend(tokenizer: Any, bos: str, bos_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
