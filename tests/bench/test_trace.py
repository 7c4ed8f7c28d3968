"""Traces and prompts: lengths and arrivals come through, what cannot be read is a sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crelle.bench.load.trace import Prompts, TraceRequest, multi_round, random_words, read_trace, write_trace
from crelle.errors import FormatError, SchemeError

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEAD + (
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:56.6805900,5000,900\n"
)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    (path := tmp_path / "t.csv").write_text(AZURE)
    return path


def test_a_written_trace_is_read_as_it_was(azure: Path, tmp_path: Path) -> None:
    requests = read_trace(azure, context=4096, rate=0.3, seconds=8)
    write_trace(tmp_path / "cut" / "t.csv", requests)
    assert read_trace(tmp_path / "cut" / "t.csv", context=4096, seconds=8) == requests


def test_trace_is_read_with_fractions_of_seconds(azure: Path) -> None:
    requests = read_trace(azure, context=8192)
    assert [(w.prompt, w.tokens) for w in requests] == [(374, 44), (396, 109), (5000, 900)]
    assert [w.at for w in requests] == pytest.approx([0, 4.314579, 10], abs=1e-5)


@pytest.mark.parametrize(("rate", "times"), [(0.2, [0, 4.314579, 10]), (2.0, [0, 0.4314579, 1]), (0, [0, 0, 0])])
def test_rate_stretches_time(azure: Path, rate: float, times: list[float]) -> None:
    assert [w.at for w in read_trace(azure, context=8192, rate=rate)] == pytest.approx(times, abs=1e-5)


def test_rounds_of_a_conversation_repeat_what_was_said() -> None:
    each = [TraceRequest(float(i), 10, 5) for i in range(5)]
    assert [r.prompt for r in multi_round(each, 3, 1000)] == [10, 25, 40, 10, 25]
    assert [r.prompt for r in multi_round(each, 3, 40)] == [10, 25, 10, 25, 10]  # the third would not fit
    assert multi_round(each, 1, 1000) == each
    with pytest.raises(SchemeError, match="at least 1 round, got 0"):
        multi_round(each, 0, 1000)


def test_only_what_is_due_in_time_and_only_so_many(azure: Path) -> None:
    assert len(read_trace(azure, context=8192, seconds=5)) == 2
    assert len(read_trace(azure, context=8192, seconds=5, requests=1)) == 1


@given(context=st.integers(2, 9000))
def test_lengths_fit_the_context(context: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    (path := tmp_path_factory.mktemp("t") / "t.csv").write_text(AZURE + "2023-11-16 18:16:00,0,0\n")
    for w in read_trace(path, context=context):
        assert w.prompt >= 1
        assert w.tokens >= 1
        assert w.prompt + w.tokens <= max(2, context)


def test_arrivals_may_be_seconds_and_out_of_order(tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_text("at,prompt,answer\n7.5,3,2\n5,1,1\n")
    assert read_trace(path, context=100) == [TraceRequest(0.0, 1, 1), TraceRequest(2.5, 3, 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no requests"),
        (HEAD, "holds no requests"),
        (HEAD + "1,2\n", "line 2: expected arrival"),
        (HEAD + "1,2,3\nyesterday,2,3\n", "line 3: expected arrival.*yesterday"),
    ],
)
def test_what_is_no_trace_is_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_text(text)
    with pytest.raises(FormatError, match=said):
        read_trace(path, context=100)
    with pytest.raises(FormatError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv", context=100)
    with pytest.raises(SchemeError, match="requests per second"):
        read_trace(path, context=100, rate=-1)


def test_prompts_repeat_with_their_seed_and_avoid_what_they_shall() -> None:
    first = [Prompts(50, avoid=(7, 8), seed=3).next(n) for n in (1, 200)]
    assert first == [Prompts(50, avoid=(7, 8), seed=3).next(n) for n in (1, 200)]
    assert [len(ids) for ids in first] == [1, 200]
    assert not {7, 8} & set(first[1])
    assert set(first[1]) <= set(range(50))
    both = Prompts(50000, seed=1)
    assert both.next(8) != both.next(8)


def test_words_are_as_many_as_asked_for() -> None:
    assert len(random_words(40, 2).split()) == 40
    assert random_words(40, 2) != random_words(40, 3)
