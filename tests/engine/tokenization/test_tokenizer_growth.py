"""A tokenizer cannot make a text many times as long; real ones are accepted."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tokenizer
from tokenizers import Regex, normalizers

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.engine.tokenization.tokenizer_growth import MAX_GROWTH, growth
from crelle.errors import UnsupportedError

Step = dict[str, Any]


def replace(pattern: str, content: str, kind: str = "String") -> Step:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: Step, name: str = "normalizers") -> Step:
    return {"type": "Sequence", name: list(steps)}


def charsmap(longest: str) -> Step:
    data = (4).to_bytes(4, "little") + b"\0" * 4 + b"a\0" + longest.encode() + b"\0b\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


DOUBLE = replace("a", "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("normalizer", sequence(*[DOUBLE] * 29)),
        ("normalizer", sequence(sequence(*[DOUBLE] * 10), sequence(*[DOUBLE] * 19))),
        ("normalizer", sequence(*[replace("", "a")] * 7)),
        ("normalizer", sequence(*[replace("x*", "a", "Regex")] * 7)),
        ("normalizer", sequence(*[replace("(?=a)", "a", "Regex")] * 7)),
        ("normalizer", replace("a", "b" * 65)),
        ("normalizer", {"type": "Prepend", "prepend": "b" * 64}),
        ("normalizer", sequence(*[{"type": "NFKC"}, replace("\u0644", "\ufdfa")] * 9)),
        ("decoder", sequence(*[DOUBLE] * 29, name="decoders")),
        ("decoder", sequence(*[{"type": "BPEDecoder", "suffix": ""}] * 29, name="decoders")),
        ("pre_tokenizer", sequence(*[BYTES] * 29, name="pretokenizers")),
    ],
)
def test_a_tokenizer_that_lengthens_texts_without_bound_is_refused(part: str, changed: Step, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: changed}))
    with pytest.raises(UnsupportedError, match=r"can expand one character to .*; at most 64 are allowed"):
        Tokenizer(tmp_path)


def test_a_post_processor_with_many_tokens_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    one = {"SpecialToken": {"id": "x", "type_id": 0}}
    known = {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}}
    template = {"type": "TemplateProcessing", "single": [one] * 1000, "pair": [], "special_tokens": known}
    template["single"] += [{"Sequence": {"id": "A", "type_id": 0}}]
    template["pair"] = [{"Sequence": {"id": n, "type_id": 0}} for n in "AB"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    with pytest.raises(UnsupportedError, match="adds 1,000,000 tokens"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "steps",
    [
        [sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))],  # Llama 2
        [replace(" ", "▁"), SPLIT],  # Gemma
        [{"type": "NFC"}, sequence(SPLIT, BYTES, name="pretokenizers")],  # Qwen
        [sequence(charsmap("x" * 18), {"type": "Strip"}, replace(" {2,}", "▁", "Regex"))],  # T5
        [
            sequence(  # ALBERT
                replace("``", '"'),
                replace("''", '"'),
                {"type": "NFKD"},
                {"type": "StripAccents"},
                {"type": "Lowercase"},
                charsmap("x" * 18),
                replace(" {2,}", " ", "Regex"),
            )
        ],
        [sequence({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}), BYTES],  # CLIP
        [{"type": "BertNormalizer"}],
        [sequence(*[replace(c, " ", "Regex") for c in "abcdefghijklmnopqrst"])],
        [None, None],
    ],
)
def test_steps_of_real_tokenizers_are_accepted(steps: list[Step | None]) -> None:
    assert growth(*steps) <= MAX_GROWTH


@pytest.mark.parametrize("pattern", ["a", "a*", "a?|bc", "", "(?=b)", r"\b", "[ab]{2,}", "a|", "^"])
@pytest.mark.parametrize("content", ["", "x", "xyz"])
def test_no_text_grows_beyond_the_bound(pattern: str, content: str) -> None:
    bound = growth(replace(pattern, content, "Regex"))
    for text in ("a", "abab", "bcbcb", "a b c " * 9):
        made = normalizers.Replace(Regex(pattern), content).normalize_str(text)
        assert len(made) <= bound * len(text) + len(content)
