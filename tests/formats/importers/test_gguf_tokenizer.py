"""The tokenizer inside a GGUF file: the same ids as the original, and every text comes back."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny_gguf as tiny
from gguf import GGUFWriter, TokenType
from gguf_models import GEMMA3, GPT2, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.open import open_weights

quick = settings(deadline=None, max_examples=100)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
words = st.lists(
    st.sampled_from(["the", " the", "  ", "\n", "in", "er", "x", "it's", "IT'S", "2024", " 7", "é", "猫", "_"])
)
texts = st.one_of(text, words.map("".join))

SAMPLE = (
    "The cat sat on the mat in the thin winter. It's there, isn't it?\n\n"
    "In 2024 they're 1234567 others.  Then it rained."
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>"]


def write(directory: Path, add: Callable[[GGUFWriter], None]) -> Path:
    """Write a GGUF file with the tokenizer that `add` describes, and extract it into a directory."""
    file = tiny.write_tiny_gguf(directory / "m.gguf", change=add)
    to = directory / "tokenizer"
    to.mkdir()
    open_weights(file).copy_tokenizer(to)
    return to


def load(directory: Path) -> Any:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


# Byte-level BPE


@cache
def trained() -> tuple[dict[str, int], list[str]]:
    """A small byte-level vocabulary with real merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [" ".join(m) for m in model["merges"]]


def byte_level(pre: str, *, bos: bool | None = None, template: str | None = None) -> Callable[[GGUFWriter], None]:
    vocab, merges = trained()

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*sorted(vocab, key=lambda t: vocab[t]), *SPECIAL, "<think>"])
        kinds = [TokenType.NORMAL] * len(vocab) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(len(vocab))
        writer.add_eos_token_id(len(vocab) + 1)
        if bos is not None:
            writer.add_add_bos_token(bos)
        if template:
            writer.add_chat_template(template)

    return add


PRES = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


@pytest.fixture(scope="module")
def byte_levels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {pre: load(write(tmp_path_factory.mktemp(pre), byte_level(pre))) for pre in PRES}


@pytest.mark.parametrize("pre", PRES)
@quick
@given(text=texts)
def test_byte_level_decodes_what_it_encoded(byte_levels: dict[str, Any], pre: str, text: str) -> None:
    ids = byte_levels[pre].encode(text, add_special_tokens=False).ids
    want = text
    if pre == "qwen2":  # its original normalizes
        import unicodedata

        want = unicodedata.normalize("NFC", text)
    assert byte_levels[pre].decode(ids) == want


def original(pre: str) -> Any:
    """The tokenizer of a family, made of the same vocabulary by transformers' own class."""
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    vocab, merges = trained()
    cls = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer}[pre]
    named = {"unk_token": SPECIAL[1], "eos_token": SPECIAL[1], "pad_token": SPECIAL[1]}
    vocab = vocab | {t: len(vocab) + i for i, t in enumerate(SPECIAL)}
    return cls(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges], **named)


@pytest.fixture(scope="module")
def originals() -> dict[str, Any]:
    return {pre: original(pre) for pre in ("gpt-2", "qwen2")}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
@quick
@given(text=texts)
def test_byte_level_gives_the_ids_of_transformers(
    byte_levels: dict[str, Any], originals: dict[str, Any], pre: str, text: str
) -> None:
    want = originals[pre].encode(text, add_special_tokens=False)
    assert byte_levels[pre].encode(text, add_special_tokens=False).ids == want


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["In", "Ġ2024"]),
        ("smollm", ["In", "Ġ", "2", "0", "2", "4"]),
        ("llama-bpe", ["In", "Ġ", "202", "4"]),
        ("qwen2", ["In", "Ġ", "2", "0", "2", "4"]),
    ],
)
def test_numbers_are_split_as_the_family_does(byte_levels: dict[str, Any], pre: str, pieces: list[str]) -> None:
    split = byte_levels[pre].pre_tokenizer.pre_tokenize_str("In 2024")
    assert [piece for piece, _ in split] == pieces


def unreachable(writer: GGUFWriter, pre: str) -> None:
    """A vocabulary with a word that no merge leads to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*alphabet, "cat", "at"])
    writer.add_token_merges(["a t"])


@pytest.mark.parametrize(("pre", "tokens"), [("llama-bpe", ["cat"]), ("gpt-2", ["c", "at"])])
def test_llama3_takes_a_word_that_is_a_token_whole(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    tokenizer = load(write(tmp_path, lambda w: unreachable(w, pre)))
    assert tokenizer.encode("cat", add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize(
    ("pre", "said", "starts"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_starts_a_text_where_the_file_or_its_family_says(
    tmp_path: Path, pre: str, said: bool | None, starts: bool
) -> None:
    directory = write(tmp_path, byte_level(pre, bos=said))
    tokens = load(directory).encode("cat").tokens
    assert (tokens[0] == "<|bos|>") is starts
    assert json.loads((directory / "tokenizer_config.json").read_text())["add_bos_token"] is starts


def test_special_tokens_are_never_taken_apart(byte_levels: dict[str, Any]) -> None:
    n = len(trained()[0])
    for tokenizer in byte_levels.values():
        ids = tokenizer.encode("the<|user|>cat<think>", add_special_tokens=False).ids
        assert ids.count(n + 2) == ids.count(n + 3) == 1
        assert tokenizer.decode(ids) == "thecat<think>"  # control tokens are silent, user-defined ones are text
        assert tokenizer.decode(ids, skip_special_tokens=False) == "the<|user|>cat<think>"


def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(write(tmp_path, byte_level("llama-bpe", template=template)))
    ids = tokenizer.encode("the cat")
    assert ids[0] == tokenizer.bos_token_id == len(trained()[0])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert tokenizer.eos_token == "<|eos|>"
    assert tokenizer.model_max_length == tiny.CONTEXT
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "[user]hi"


# SentencePiece

BYTES = [f"<0x{b:02X}>" for b in range(256)]


def sentencepiece(
    pieces: Sequence[str], scores: Sequence[float], *, prefix: bool | None = None
) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *BYTES, *pieces])
        writer.add_token_scores([0.0] * 259 + list(scores))
        kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        writer.add_token_types(kinds + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    return add


def llama_cpp_spm(text: str, score: dict[str, float]) -> list[str]:
    """SentencePiece BPE in plain words: join the neighbours whose union scores best, leftmost first, until none is."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [a + b for a, b in pairwise(symbols)]
        found = [(-score[u], i) for i, u in enumerate(unions) if u in score]
        if not found:
            break
        i = min(found)[1]
        symbols[i : i + 2] = [unions[i]]
    pieces = []
    for s in symbols:
        pieces += [s] if s in score else [f"<0x{b:02X}>" for b in s.encode()]
    return pieces


def syllables(count: int) -> dict[str, float]:
    """A vocabulary of random joinable pieces over a few letters, each with a score of its own."""
    rng = random.Random(0)
    pieces = ["▁", *"abcdé"]
    while len(pieces) < count:
        piece = rng.choice(pieces) + rng.choice(pieces)
        # In pieces like `aa` several cuts overlap in one text, and implementations differ in which comes first.
        if piece not in pieces and len(set(piece)) == len(piece):
            pieces.append(piece)
    return {p: -float(i) for i, p in enumerate(rng.sample(pieces, len(pieces)))}


SCORES = syllables(60)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(write(tmp_path_factory.mktemp("spm"), sentencepiece(list(SCORES), list(SCORES.values()))))


@quick
@given(st.text("abcdé xß", max_size=30))
def test_sentencepiece_joins_by_score(spm: Any, text: str) -> None:
    assert spm.encode(text, add_special_tokens=False).tokens == llama_cpp_spm(text, SCORES)


@quick
@given(text)
def test_sentencepiece_decodes_what_it_encoded(spm: Any, text: str) -> None:
    ids = spm.encode(text, add_special_tokens=False).ids
    assert spm.decode(ids) == text.replace("▁", " ")  # ▁ is how the format writes a space


def test_sentencepiece_starts_with_bos_and_spells_unknown_characters_in_bytes(spm: Any) -> None:
    assert spm.encode("猫").tokens[:1] == ["<s>"]
    assert spm.encode("猫").tokens[2:] == ["<0xE7>", "<0x8C>", "<0xAB>"]
    assert spm.decode(spm.encode("猫").ids) == "猫"


@pytest.mark.parametrize("prefix", [None, True, False])
def test_the_space_before_a_text_is_added_where_the_file_says(tmp_path: Path, prefix: bool | None) -> None:
    tokenizer = load(write(tmp_path, sentencepiece(list(SCORES), list(SCORES.values()), prefix=prefix)))
    assert (tokenizer.encode("x").tokens[1] == "▁") is (prefix is not False)
    for text in ("x", " x", "x y "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_of_sentencepiece_are_never_taken_apart(spm: Any) -> None:
    ids = spm.encode("ab<s>ab</s><unk>", add_special_tokens=False).ids
    assert [i for i in ids if i < 3] == [1, 2, 0]
    assert "<" not in spm.decode(ids)


def test_llama2_vocabulary_gives_the_ids_of_its_own_tokenizer(tmp_path: Path, data: Path) -> None:
    own = load(data / "stories15M")
    vocab = sorted(own.get_vocab().items(), key=lambda item: item[1])
    pieces = [token for token, _ in vocab[259:]]
    made = load(write(tmp_path, sentencepiece(pieces, [-float(i) for i in range(len(pieces))])))
    story = (data / "text" / "tinystories-test.txt").read_text()[:20000]
    article = (data / "text" / "wikitext2-test.txt").read_text()[:20000]
    runs = "\n".join(c * n for c in "=-0a*# \t\n" for n in range(1, 40))
    code = "def f(x):\n        return {'a': [x ** 2] * 10}  # ööö → 猫\n\n\n"
    # Only texts without a space before them: there the file at hand leaves out the prefix that SentencePiece adds.
    for text in (story.strip(), article.strip(), runs, code, "", "x  y", "猫"):
        assert made.encode(text).ids == own.encode(text).ids
        assert made.decode(made.encode(text).ids) == own.decode(own.encode(text).ids)


def gemma(writer: GGUFWriter) -> None:
    """As llama.cpp's converter writes Gemma's: runs of spaces and newlines are user-defined tokens, spaces as such."""
    runs, pieces = ["  ", "   ", "\n", "\n\n", "<b>"], ["▁", "a", "b", "▁a", "ab", "▁ab"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", *runs, *BYTES, *pieces])
    writer.add_token_scores([-1000.0] * 10 + [-1000.0] * 256 + [-float(i) for i in range(len(pieces))])
    control, user = TokenType.CONTROL, TokenType.USER_DEFINED
    kinds = [control, control, control, TokenType.UNKNOWN, control] + [user] * 5 + [TokenType.BYTE] * 256
    writer.add_token_types(kinds + [TokenType.NORMAL] * len(pieces))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


@pytest.fixture(scope="module")
def gemma_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    to = tmp_path_factory.mktemp("gemma")
    open_weights(write_gguf(to / "m.gguf", GEMMA3, change=gemma)).copy_tokenizer(to)
    assert json.loads((to / "tokenizer_config.json").read_text())["model_max_length"] == 96
    return load(to)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab ab", ["ab", "▁ab"]),  # no space before the text
        ("a  b", ["a", "  ", "b"]),
        ("a    b", ["a", "   ", "▁", "b"]),
        ("\n\n\nb", ["\n\n", "\n", "b"]),
        ("<start_of_turn>a<b>b", ["<start_of_turn>", "a", "<b>", "b"]),
        ("\té", ["<0x09>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_gemma_keeps_runs_of_whitespace_whole(gemma_tokenizer: Any, text: str, tokens: list[str]) -> None:
    encoded = gemma_tokenizer.encode(text)
    assert encoded.tokens == ["<bos>", *tokens]
    assert gemma_tokenizer.decode(encoded.ids, skip_special_tokens=False) == f"<bos>{text}"


@quick
@given(text=text)
def test_gemma_decodes_what_it_encoded(gemma_tokenizer: Any, text: str) -> None:
    ids = gemma_tokenizer.encode(text).ids
    assert gemma_tokenizer.decode(ids) == text.replace("▁", " ")


def test_gpt2s_file_has_its_tokenizer(tmp_path: Path) -> None:
    open_weights(write_gguf(tmp_path / "m.gguf", GPT2)).copy_tokenizer(tmp_path)
    assert load(tmp_path).encode("th").tokens == ["<|bos|>", "th"]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 96


# Refusals


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"has a 'bert' tokenizer; Crelle reads 'gpt2' and 'llama' from GGUF"):
        write(tmp_path, lambda w: (w.add_tokenizer_model("bert"), w.add_token_list(["a"])))  # type: ignore[arg-type,return-value,func-returns-value]


def test_unknown_splitting_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer 'deepseek-v3'"):
        write(tmp_path, byte_level("deepseek-v3"))


def test_a_file_without_a_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"has no metadata 'tokenizer\.ggml\.tokens'"):
        write(tmp_path, lambda w: None)


def no_such_union(writer: GGUFWriter) -> None:
    unreachable(writer, "gpt-2")
    writer.kv_data[0]["tokenizer.ggml.merges"].value.append("c t")


def too_few_types(writer: GGUFWriter) -> None:
    unreachable(writer, "gpt-2")
    writer.add_token_types([TokenType.NORMAL])


@pytest.mark.parametrize("damage", [no_such_union, too_few_types, sentencepiece(["a", "b", "ab"], [])])
def test_parts_that_do_not_fit_are_a_sentence(tmp_path: Path, damage: Callable[[GGUFWriter], None]) -> None:
    with pytest.raises(FormatError, match="its tokenizer is inconsistent") as refused:
        write(tmp_path, damage)
    assert str(tmp_path / "m.gguf") in str(refused.value)


def test_gguf_writes_the_keys_that_are_read() -> None:
    """The names above come from the `gguf` package: a renaming there would silently turn a setting off here."""
    keys = gguf.Keys.Tokenizer
    assert keys.ADD_BOS == "tokenizer.ggml.add_bos_token"
    assert keys.ADD_PREFIX == "tokenizer.ggml.add_space_prefix"
    assert keys.CHAT_TEMPLATE == "tokenizer.chat_template"
