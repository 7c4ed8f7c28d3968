"""Patterns match as Python's do, in linear time, and what is beyond their language is refused."""

import re

import pytest
from alarm import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import share_of

from crelle.errors import UnsupportedError
from crelle.formats.importers.name_patterns import NamePattern

REAL = [
    r".*self_attn\.(q|k|v)_proj$",
    r".*\.mlp\.(gate|up)_proj",
    r"model\.layers\.\d+\.mlp\.down_proj$",
    r"^model\.layers\.(0|1|2)\..*",
    r".*layers\.[0-9]{1,2}\..*_proj",
    r"lm_head",
    r".*",
    r"(?:model\.)?layers\.[^.]+\.mlp.*?gate_proj",
    r"[\w.]+up_proj",
]
MODULES = ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
NAMES = [f"model.layers.{i}.{m}_proj" for i in (0, 1, 12) for m in MODULES]
NAMES += ["lm_head", "model.embed_tokens", "layers.7.mlp.gate_proj", ""]


@pytest.mark.parametrize("pattern", REAL)
def test_patterns_of_real_files_match_as_in_python(pattern: str) -> None:
    ours = NamePattern(pattern)
    for name in NAMES:
        assert ours.match(name) == (re.match(pattern, name) is not None), name


atoms = st.sampled_from(["a", "b", r"\.", ".", r"\d", r"\w", "[ab]", "[^a]", "[a-c0]", "^", "$"])
repeats = st.sampled_from(["", "", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}", "{2,}"])
pieces = st.builds(lambda a, r: a if a in "^$" else a + r, atoms, repeats)


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3).map("|".join)
    return st.builds(lambda xs, r, after: f"({xs}){r}{after}", several, repeats, inner)


patterns = st.recursive(st.lists(pieces, max_size=4).map("".join), grouped, max_leaves=6)


class TooLongError(Exception):
    """Python's search goes on and on."""


@settings(deadline=None, max_examples=share_of(500))
@given(pattern=patterns, names=st.lists(st.text("ab0._", max_size=7), min_size=1, max_size=5))
def test_random_patterns_match_as_in_python(pattern: str, names: list[str]) -> None:
    theirs, ours = re.compile(pattern), NamePattern(pattern)
    for name in names:
        try:
            with at_most(0.5, TooLongError()):
                want = theirs.match(name) is not None
        except TooLongError:  # a few patterns take Python minutes
            continue
        assert ours.match(name) == want


def test_time_is_linear_where_pythons_is_exponential() -> None:
    """It would not end before the sun does; the alarm is for that."""
    with at_most(60, TooLongError()):
        assert not NamePattern(r"(a+)+(a|aa)*(.*)*!").match("a" * 500)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)", "look-ahead"),
        ("(?!a).*", "look-ahead"),
        ("(?i)a", "flags"),
        (r"(a)\1", "is not supported"),
        (r"\bx", "is not supported"),
        ("(a", "not closed"),
        ("a)", "closes no group"),
        ("[a", "not closed"),
        ("[b-a]", "is descending"),
        ("*a", "repeats nothing"),
        ("a**", "repeats a repeat"),
        ("a{5,2}", "must ascend"),
        ("a{101}", "at most 100"),
        ("a{x}", "should begin a count"),
        ("(((a{99}){99}){99})", "states"),
        ("(" * 40 + ")" * 40, "nests"),
        ("a" * 1001, "1000 characters"),
        ("a\\", "is not supported"),
    ],
)
def test_what_is_beyond_the_language_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        NamePattern(pattern)


def test_patterns_that_share_work_stop_together() -> None:
    work = [1000]
    pattern = NamePattern(".*a.*b.*c!", work)
    assert not pattern.match("abc")
    with pytest.raises(UnsupportedError, match="takes too long"):
        pattern.match("abc" * 100)
