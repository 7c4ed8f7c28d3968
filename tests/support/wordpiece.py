"""A tokenizer as BERT has it, of a few words."""

import json
from pathlib import Path

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "cat", "dog", "runs", "sleeps", "the", ".", "on", "mat"]


def write_wordpiece(to: Path) -> Path:
    """Write a tokenizer as BERT has it, with the truncation and padding that sentence encoders come with."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(16)
    tokenizer.save(str(to / "tokenizer.json"))
    (to / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return to
