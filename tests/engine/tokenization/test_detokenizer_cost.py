"""Beginning a text costs the same after any prompt, also one whose ids are no text."""

from pathlib import Path

import pytest

from crelle.engine.tokenization.tokenizer import Detokenizer, Tokenizer


@pytest.mark.parametrize("text", ["a", "é", "€5", "\x80"], ids=["ascii", "two bytes", "three bytes", "no character"])
def test_a_long_prompt_of_any_ids_is_looked_at_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The ids of a byte that is in no character were decoded 16,000 times over: minutes, under the engine's lock."""
    tokenizer = Tokenizer(tiny_model)
    (last, *_) = reversed(tokenizer.encode(text, bos=False))
    decode, decoded = Tokenizer.decode, [0]

    def counted(self: Tokenizer, ids: list[int]) -> str:
        decoded[0] += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    Detokenizer(tokenizer, [last] * 500)
    assert decoded[0] < 1000


def test_a_character_that_the_prompt_begins_is_given_out_whole(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    for text in ("é", "€", "𝄞"):
        ids = tokenizer.encode(text, bos=False)
        for n in range(1, len(ids)):
            detokenizer = Detokenizer(tokenizer, [*tokenizer.encode("Hello"), *ids[:n]])
            assert "".join(map(detokenizer.push, ids[n:])) + detokenizer.finish() == text
