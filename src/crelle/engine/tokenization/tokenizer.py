"""Text to token ids and back.

tokenizer.json is read with the `tokenizers` library itself: loading transformers for it would take longer than the
first token. transformers is loaded only for tokenizers that have no tokenizer.json; see tokenizer_files.py.
"""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from crelle.engine.tokenization.tokenizer_files import load_fast, load_from_vocabulary, special_tokens, template_source
from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.storage.io import read_json, shown
from crelle.formats.storage.open import Weights
from crelle.formats.storage.rust import panics_are

_TAIL = 8  # ids of a prompt that mostly decide how the text after it decodes
_LONGEST_TAIL = 64  # where a prompt is not UTF-8, no count of them does
_BYTES = 4  # of a character in UTF-8, at most
_LONG = 4096  # characters from which a text is encoded without the interpreter lock
Message = dict[str, Any]  # {"role": "user", "content": "…"}


class Tokenizer:
    """The tokenizer in a model's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = path / "tokenizer_config.json"
        self.config = read_json(config) if config.exists() else {}
        self._special = special_tokens(path, self.config)
        self._template_source = template_source(path, self.config)
        self._fast = self._load_fast()
        _ = self.bos_id  # a tokenizer that cannot encode is better told of now

    @classmethod
    def of(cls, weights: Weights) -> "Tokenizer":
        """Load the tokenizer that belongs to some weights (a GGUF file carries it inside)."""
        if weights.path.is_dir():
            return cls(weights.path)
        with tempfile.TemporaryDirectory(prefix="crelle-tokenizer-") as d:
            weights.copy_tokenizer(Path(d))
            return cls(Path(d))

    def _load_fast(self) -> Any:
        file = self.path / "tokenizer.json"
        if file.exists():
            return load_fast(file)
        slow = load_from_vocabulary(self.path, self.config)
        self._special = dict(slow.special_tokens_map) | self._special  # a class has special tokens of its own
        return slow.backend_tokenizer

    @property
    def backend(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._fast.to_str()
        return text

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token."""
        found: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return found

    @cached_property
    def bos_id(self) -> int | None:
        """The token that every sequence starts with here (BOS), if there is one."""
        probe = self._encode("a", add_special_tokens=True)
        added = probe.special_tokens_mask[:1] == [1]  # the post-processor put something before the text
        wanted = self.config.get("add_bos_token")
        if wanted is not None and not isinstance(wanted, bool):
            file = self.path / "tokenizer_config.json"
            raise FormatError(f"{file}: 'add_bos_token' must be true or false, got {shown(wanted)}")
        if wanted is False or (wanted is None and not added):
            return None
        if added:
            return int(probe.ids[0])
        return self.special_id("bos_token")

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token (bos_token, eos_token …), whether or not texts get it here."""
        token = self._special.get(name)
        found: int | None = self._fast.token_to_id(token) if token else None
        return found

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        try:
            with panics_are(f"the tokenizer of {self.path} fails on this text"):
                if len(text) <= _LONG:
                    return self._fast.encode(text, add_special_tokens=add_special_tokens)
                # `encode` would hold the interpreter lock, a second or two for a million characters
                return self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as e:  # what the library says of lone surrogates: bytes that were never UTF-8
            raise SchemeError("the text cannot be encoded: it is not valid Unicode (UTF-8)") from e
        except (FormatError, MemoryError):
            raise
        except Exception as e:  # the library raises bare Exception
            raise FormatError(f"the tokenizer of {self.path} fails on this text: {shown(str(e), 300)}") from e

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Return the ids of a text; `bos` puts the start token first where this tokenizer adds one."""
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def encode_whole(self, text: str, most: int) -> list[int]:
        """Return the ids of a text with all special tokens around it (BERT's [CLS] and [SEP]), cut to `most`."""
        probe = self._encode("a", add_special_tokens=True)
        inside = [i for i, special in enumerate(probe.special_tokens_mask) if not special]
        before, after = probe.ids[: inside[0]], probe.ids[inside[-1] + 1 :]
        room = most - len(before) - len(after)
        return [*before, *self.encode(text, bos=False)[:room], *after]

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of ids; special: with special tokens, which otherwise are left out."""
        with panics_are(f"the tokenizer of {self.path} fails on these tokens"):
            text: str = self._fast.decode(ids, skip_special_tokens=not special)
        return text

    @cached_property
    def _template(self) -> Any:
        from crelle.engine.tokenization.chat_template import ChatTemplate

        if self._template_source is None:
            raise UnsupportedError("this model has no chat template; use generate instead")
        return ChatTemplate(self._template_source)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template_source is not None

    @property
    def template(self) -> str | None:
        """The source of the chat template."""
        return self._template_source

    @property
    def thinks(self) -> bool:
        """Whether the chat template marks reasoning."""
        return "<think>" in (self._template_source or "") or "</think>" in (self._template_source or "")

    def render_chat(self, messages: list[Message], tools: Sequence[Any] = (), **options: Any) -> str:
        """Return a conversation as the model's chat template writes it, up to where the assistant's answer begins.

        tools: functions that may be called, as OpenAI writes them; options: what else the template reads.
        """
        text: str = self._template.render(messages, self._special, tools, **options)
        return text

    def encode_chat(self, messages: list[Message], tools: Sequence[Any] = (), **options: Any) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer begins."""
        return self.encode(self.render_chat(messages, tools, **options), bos=False)


class Detokenizer:
    """Incremental detokenizer: ids to text, of which only what later tokens cannot change is returned.

    The text continues a prompt: SentencePiece drops the space of a text's first word, but not of a later one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._ids = tokenizer, _tail(tokenizer, list(prompt))
        # ids before `_read` are given out; `_start` begins the context they decode in
        self._start, self._read = 0, len(self._ids) - _begun(tokenizer, self._ids)

    def push(self, token: int) -> str:
        """Add a token, return the text that became certain (nothing while a character is still incomplete)."""
        self._ids.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        now = self._tokenizer.decode(self._ids[self._start :])
        if not final and now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]


def _begun(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return how many ids at the end are the beginning of a character, which we give out as a whole.

    A character has 4 bytes at most: what is still broken without the last 3 ids is no character. (Looking further
    would take minutes for a long prompt of such ids, and whoever may send ids may send those.)
    """
    for n in range(min(_BYTES, len(ids) + 1)):
        if not tokenizer.decode(ids[: len(ids) - n]).endswith("\N{REPLACEMENT CHARACTER}"):
            return n
    return 0


def _tail(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """Return the last ids, so many that they begin with a whole character."""
    n = _TAIL
    while n < min(len(prompt), _LONGEST_TAIL):
        text = tokenizer.decode(prompt[-n:])
        if text and not text.startswith("\N{REPLACEMENT CHARACTER}"):
            break
        n *= 2
    return prompt[-n:]
