"""Single tokens as text and bytes, for logprobs."""

import re

from crelle.engine.tokenization.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte that is in no other token


class TokenTexts:
    """Knows what every token stands for; looks each up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._known = tokenizer, dict[int, bytes]()
        fast = tokenizer._fast
        self._name = fast.id_to_token
        self._special = {i for i, t in fast.get_added_tokens_decoder().items() if t.special}
        self._alphabet = _byte_alphabet() if "ByteLevel" in type(fast.decoder).__name__ else None

    def raw(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def special(self, token: int) -> bool:
        """Whether a token is no part of a text."""
        return token in self._special

    def text(self, token: int) -> str:
        r"""Return a token as text; where it is only part of a character, as OpenAI writes it: bytes:\xe2\x82."""
        raw = self.raw(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _look_up(self, token: int) -> bytes:
        name: str | None = self._name(token)
        if name is None:  # the embedding has more rows than the tokenizer has tokens
            return f"<unused {token}>".encode()
        if token in self._special:
            return name.encode()
        if self._alphabet is not None and all(c in self._alphabet for c in name):
            return bytes(self._alphabet[c] for c in name)
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        if "▁" in name:  # a word's space, which decoding the token alone would drop
            return name.replace("▁", " ").encode()
        return self.tokenizer.decode([token]).encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's letters for bytes: visible Latin-1 stands for itself, the rest for what follows 255 in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(visible)]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(rest)}
