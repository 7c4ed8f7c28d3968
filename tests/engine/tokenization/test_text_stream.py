"""Text that comes in pieces: however it is cut into tokens, the pieces say the same, and no stop string leaks."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.engine.llm import LLM
from crelle.engine.sampling import batch_sampler
from crelle.engine.sampling.sampler import Sampling
from crelle.engine.sampling.stop_filter import StopFilter
from crelle.engine.tokenization.tokenizer import Detokenizer, Tokenizer
from crelle.models.loader import load

quick = settings(deadline=None)
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
texts = st.text(st.sampled_from("ab é漢🙂\n�") | st.characters(exclude_categories=["Cs"]), max_size=30)


class Pieces:
    """A tokenizer whose token i stands for the i-th of some byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


@st.composite
def cuttings(draw: st.DrawFn, of: st.SearchStrategy[bytes]) -> list[bytes]:
    """Some bytes, cut anywhere, also within characters and into empty pieces."""
    whole = draw(of)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=len(whole) + 2)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def cut_text(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[list[bytes]]:
    return cuttings(text.map(str.encode))


def stream(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


# Detokenizer -------------------------------------------------------------------------------------------------------


@quick
@given(cut_text())
def test_any_cutting_of_a_text_gives_the_text(pieces: list[bytes]) -> None:
    said = stream(Detokenizer(Pieces(pieces)), range(len(pieces)))
    assert "".join(said) == b"".join(pieces).decode()


@quick
@given(cut_text(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=UNKNOWN))))
def test_half_a_character_is_never_given_out(pieces: list[bytes]) -> None:
    assert all(UNKNOWN not in s for s in stream(Detokenizer(Pieces(pieces)), range(len(pieces))))


@quick
@given(cuttings(st.binary(max_size=24)))
def test_bytes_that_are_no_text_come_as_they_decode_in_one(pieces: list[bytes]) -> None:
    said = stream(Detokenizer(Pieces(pieces)), range(len(pieces)))
    assert "".join(said) == b"".join(pieces).decode("utf-8", errors="replace")


@quick
@given(cut_text(), st.data())
def test_text_continues_its_prompt(pieces: list[bytes], data: st.DataObject) -> None:
    """What ends within a character in the prompt is given out whole."""
    read = data.draw(st.integers(0, len(pieces)))
    said = stream(Detokenizer(Pieces(pieces), range(read)), range(read, len(pieces)))
    before, whole = b"".join(pieces[:read]), b"".join(pieces).decode()
    assert whole.endswith("".join(said))
    if not before.decode("utf-8", errors="replace").endswith(UNKNOWN):
        assert before.decode() + "".join(said) == whole


def test_characters_come_as_soon_as_they_are_whole() -> None:
    pieces = [bytes([b]) for b in "aé🙂b".encode()]
    assert stream(Detokenizer(Pieces(pieces)), range(8)) == ["a", "", "é", "", "", "", "🙂", "b", ""]


def write_sentencepiece(to: Path) -> Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces are ▁, the first word loses its space, unknown bytes fall back."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehinotw", "▁t", "▁a"]
    fast = Fast(
        models.BPE(
            {t: i for i, t in enumerate(tokens)},
            [("▁", "t"), ("▁", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(undo)
    fast.add_special_tokens(["<s>", "</s>"])
    fast.save(str(to / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(to)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


def test_space_of_the_first_new_word_stays(sentencepiece: Tokenizer) -> None:
    prompt, continuation = "one and two", " the 🙂 tea"
    ids = sentencepiece.encode(prompt + continuation)
    at = len(sentencepiece.encode(prompt))
    assert sentencepiece.decode(ids[at:]) == continuation[1:]  # the trap
    assert "".join(stream(Detokenizer(sentencepiece, ids[:at]), ids[at:])) == continuation


def test_generated_text_continues_the_prompt_with_its_space(
    sentencepiece: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that says exactly " the tea"."""
    model, weights = load(write_tiny_model(tmp_path, vocab_size=280), device="cpu")
    prompt, whole = sentencepiece.encode("one and two"), sentencepiece.encode("one and two the tea")
    script = iter(whole[len(prompt) :])
    monkeypatch.setattr(batch_sampler, "random_tokens", lambda logits, samplers: torch.tensor([next(script)]))
    llm = LLM(model, sentencepiece, weights)
    assert (
        llm.generate("one and two", Sampling(max_tokens=len(whole) - len(prompt), temperature=1.0)).text == " the tea"
    )


def test_first_word_of_a_whole_text_has_no_space(sentencepiece: Tokenizer) -> None:
    assert "".join(stream(Detokenizer(sentencepiece, [1]), sentencepiece.encode("the tea", bos=False))) == "the tea"


def test_stories15m_text_continues_at_every_token(data: Path) -> None:
    tokenizer = Tokenizer(data / "stories15M")
    text = "Once upon a time, café 漢字 🙂 said:\n  two  spaces"
    ids = tokenizer.encode(text)
    whole = 0
    for at in range(1, len(ids)):
        before = tokenizer.decode(ids[:at])
        said = "".join(stream(Detokenizer(tokenizer, ids[:at]), ids[at:]))
        if not before.endswith(UNKNOWN):
            assert before + said == text
            whole += 1
    assert whole > 15


# StopFilter --------------------------------------------------------------------------------------------------------

letters = st.text("abé", max_size=25)
stops = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def until_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """The text before the stop string that is complete first; None if there is none."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else None


@quick
@given(cut_text(letters), stops)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    text = StopFilter(Detokenizer(Pieces(pieces)), stop)
    said = []
    for i in range(len(pieces)):
        said.append(text.push(i))
        if text.stopped:
            break
    said.append(text.finish())
    whole = b"".join(pieces).decode()
    expected = until_stop(whole, stop)
    assert text.stopped == (expected is not None)
    assert "".join(said) == text.text == (whole if expected is None else expected)
    assert not any(s in "".join(said) for s in stop)


@quick
@given(letters, stops)
def test_only_the_possible_beginning_of_a_stop_string_is_held_back(whole: str, stop: tuple[str, ...]) -> None:
    text = StopFilter(Detokenizer(Pieces([c.encode() for c in whole])), stop)
    said = ""
    for i in range(len(whole)):
        said += text.push(i)
        if text.stopped:
            break
        held = whole[len(said) : i + 1]
        assert any(s.startswith(held) for s in stop)
        assert held not in stop


def test_text_without_stop_strings_passes_at_once() -> None:
    text = StopFilter(Detokenizer(Pieces([b"a", b"b"])), ())
    assert [text.push(0), text.push(1), text.finish()] == ["a", "b", ""]
    assert not text.stopped


@pytest.mark.parametrize("pieces", [["ab", "cd"], ["abcd"], ["a", "b", "c", "d"], ["a", "bcd"]])
def test_of_overlapping_stops_the_one_complete_first_counts(pieces: list[str]) -> None:
    text = StopFilter(Detokenizer(Pieces([p.encode() for p in pieces])), ("abcd", "bc"))
    said = ""
    for i in range(len(pieces)):
        said += text.push(i)
        if text.stopped:
            break
    assert text.stopped
    assert said + text.finish() == "a"


def test_stop_string_in_what_was_held_back_to_the_end_counts() -> None:
    text = StopFilter(Detokenizer(Pieces([b"x", b"stop\xf0"])), ("stop",))
    assert [text.push(0), text.push(1), text.stopped] == ["x", "", False]
    assert [text.finish(), text.stopped, text.text] == ["", True, "x"]
