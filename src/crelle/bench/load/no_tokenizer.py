"""What stands in for the tokenizer of a model of random weights, whose tokens mean nothing."""

from collections.abc import Sequence

from crelle.errors import UnsupportedError


class NoTokenizer:
    """Takes and gives no text."""

    def encode(self, text: str, bos: bool = True) -> list[int]:
        raise UnsupportedError("a model of random weights has no tokenizer; give it token ids")

    def decode(self, ids: Sequence[int]) -> str:
        return ""
