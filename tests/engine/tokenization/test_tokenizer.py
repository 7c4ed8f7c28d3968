"""Ids equal those of transformers; when a text starts with BOS; what cannot be a tokenizer."""

import ast
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer

import crelle
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.engine.tokenization.tokenizer_files import backtracks
from crelle.errors import FormatError, SchemeError, UnsupportedError

BOS, START, END = 256, 257, 258
TEMPLATES = {"bos": "<|bos|> $A", "bos and eos": "<|bos|> $A <|end|>", "eos": "$A <|end|>"}
TEXTS = (
    "Once upon a time",
    "",
    " ",
    "\n",
    " leading and  double spaces ",
    "naïve 漢字 🙂\n\ttab",
    "a</s>b<s>",
    "1234 5.6 it's",
)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def tokenizer_with(to: Path, post: str | None, **config: Any) -> Tokenizer:
    """The byte tokenizer with another post-processor and other settings."""
    write_tokenizer(to)
    fast = Fast.from_file(str(to / "tokenizer.json"))
    if post:
        special = [("<|bos|>", BOS), ("<|end|>", END)]
        fast.post_processor = processors.TemplateProcessing(single=TEMPLATES[post], special_tokens=special)
    else:
        fast.post_processor = processors.Sequence([])
    fast.save(str(to / "tokenizer.json"))
    change_config(to, **config)
    return Tokenizer(to)


@pytest.mark.parametrize(
    ("post", "add_bos_token", "expected"),
    [
        (None, None, None),
        (None, False, None),
        (None, True, BOS),  # the config's word, though tokenizer.json does not do it
        ("bos", None, BOS),
        ("bos", True, BOS),
        ("bos", False, None),
        ("bos and eos", None, BOS),
        ("bos and eos", False, None),
        ("eos", None, None),  # what is added behind a text does not start it
        ("eos", True, BOS),
        ("eos", False, None),
    ],
)
def test_text_starts_with_bos_where_config_or_post_processor_say_so(
    post: str | None, add_bos_token: bool | None, expected: int | None, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(tmp_path, post, add_bos_token=add_bos_token)
    text = tokenizer.encode("A", bos=False)
    assert tokenizer.bos_id == expected
    assert tokenizer.encode("A") == ([] if expected is None else [expected]) + text
    assert len(text) == 1


def test_bos_token_may_be_written_as_an_object(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, None, add_bos_token=True, bos_token={"content": "<|start|>", "lstrip": False})
    assert tokenizer.bos_id == START


def test_no_bos_token_no_bos(tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, None, add_bos_token=True, bos_token=None).bos_id is None


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_decode_undoes_encode(text: str, tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|bos|>", "")


def test_ids_equal_those_of_transformers(tiny_model: Path) -> None:
    ours, theirs = Tokenizer(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_stories15m_ids_equal_those_of_transformers(data: Path) -> None:
    ours, theirs = Tokenizer(data / "stories15M"), AutoTokenizer.from_pretrained(data / "stories15M")
    lines = (data / "text" / "tinystories-test.txt").read_text().splitlines()[:50]
    for text in (*TEXTS, *lines, "\n".join(lines)):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.bos_id == 1
    assert ours.encode("Once") == [1, *ours.encode("Once", bos=False)]


def test_tokenizer_without_tokenizer_json_is_made_by_transformers(tmp_path: Path) -> None:
    """As older Qwen2 directories are: vocab.json and merges.txt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {t: i for i, t in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", **special}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("abb") == [vocabulary["ab"], vocabulary["b"]]
    assert tokenizer.bos_id is None


# What the files say about prompts, and code that they bring ------------------------------------------------------

CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PAD = {
    "strategy": {"Fixed": 32},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 7,
    "pad_type_id": 0,
    "pad_token": "x",
}


def test_truncation_and_padding_of_tokenizer_json_leave_prompts_alone(tmp_path: Path) -> None:
    plain = tokenizer_with(tmp_path, "bos").encode("a long prompt")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": CUT, "padding": PAD}))
    change_config(tmp_path, model_max_length=2)
    assert len(plain) == 14
    assert Tokenizer(tmp_path).encode("a long prompt") == plain
    talk = [{"role": "user", "content": "a long prompt"}]
    assert len(Tokenizer(tmp_path).encode_chat(talk)) > 20


def vocabulary(to: Path, **config: Any) -> Path:
    """A directory with vocabulary files and no tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    (to / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate([*alphabet, "<|endoftext|>"])}))
    (to / "merges.txt").write_text("#version: 0.2\n")
    said = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", **config}
    (to / "tokenizer_config.json").write_text(json.dumps(said))
    return to


def test_a_small_model_max_length_leaves_prompts_alone_without_tokenizer_json_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer(vocabulary(tmp_path, model_max_length=2, truncation_side="left", padding_side="left"))
    assert len(tokenizer.encode("a long prompt")) == 13
    assert tokenizer._fast.truncation is None
    assert tokenizer._fast.padding is None


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_of_a_directory_is_never_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where somebody at the terminal would say yes; nothing is asked."""
    mark, model = tmp_path / "it ran", tmp_path / "m"
    model.mkdir()
    (model / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: pass\n")
    vocabulary(model, tokenizer_class="Evil" if where == "tokenizer_config.json" else "GPT2Tokenizer")
    (model / "config.json").write_text('{"model_type": "llama"}')
    said = json.loads((model / where).read_text())
    (model / where).write_text(json.dumps(said | {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}))
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(UnsupportedError, match=r"never runs a model's code\. Save the tokenizer as tokenizer\.json"):
        Tokenizer(model)
    assert not mark.exists()
    assert answers.tell() == 0


def test_code_beside_a_tokenizer_json_is_not_looked_at(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    change_config(tmp_path, auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil")
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert tokenizer.encode_chat(TALK)


def test_every_use_of_transformers_says_that_it_trusts_no_code() -> None:
    source = Path(crelle.__file__).parent
    nodes = [node for f in source.rglob("*.py") for node in ast.walk(ast.parse(f.read_text()))]
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    calls = [call for call in calls if re.match(r"[\w.]+\.from_pretrained\(", call)]
    assert calls
    assert all("trust_remote_code=False" in call and "local_files_only=True" in call for call in calls)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
CL100K = r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t)?|\p{N}{1,3}|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)


@pytest.mark.parametrize(
    "pattern", [GPT2, LLAMA_3, CL100K, O200K, DEEPSEEK, r"\p{N}", "[一-龥]+", " ?[^(\\s|[.,!?…])]+"]
)
def test_splitting_patterns_of_real_tokenizers_are_accepted(pattern: str) -> None:
    assert not backtracks(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*",
        "((a+)b?)*",
        "(?:x|a+){2,}",
        "(a|b+){5}",
        r"(a)\1+",
        "a*b*c*d*",
        "(a{2,}){2,}",
        "(?>(a+)?)*",
        r"\s*a*.*.*x",
    ],
)
def test_splitting_patterns_that_can_take_for_ever_are_found(pattern: str) -> None:
    assert backtracks(pattern)


def test_a_tokenizer_with_such_a_pattern_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    both = {"type": "Sequence", "pretokenizers": [split, json.loads(file.read_text())["pre_tokenizer"]]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": both}))
    with pytest.raises(UnsupportedError, match=r"pattern '\(a\+\)\+\$' .* can take forever"):
        Tokenizer(tmp_path)


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has no tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"not json", b""])
def test_broken_tokenizer_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer(tmp_path)


def test_text_that_is_not_unicode_is_refused(tiny_model: Path) -> None:
    with pytest.raises(SchemeError, match="not valid Unicode"):
        Tokenizer(tiny_model).encode("a\udcff")


# Chat --------------------------------------------------------------------------------------------------------------

TALK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hé?"}]


def test_conversation_is_written_with_the_models_template(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    ids = tokenizer.encode_chat(TALK)
    peer = AutoTokenizer.from_pretrained(tiny_model)
    text = peer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|start|>assistant\n")
    assert ids == peer(text, add_special_tokens=False)["input_ids"]
    assert (ids.count(BOS), ids.count(START), ids.count(END)) == (0, 3, 2)  # the template alone decides about BOS


def test_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    change_config(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}!")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == "Hé?!"


def test_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    change_config(tmp_path, chat_template=None)
    with pytest.raises(UnsupportedError, match="no chat template"):
        Tokenizer(tmp_path).encode_chat(TALK)


def test_what_the_template_refuses_is_a_sentence(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    change_config(tmp_path, chat_template="{{ raise_exception('no system role here') }}")
    with pytest.raises(UnsupportedError, match="template rejects this conversation: no system role here"):
        Tokenizer(tmp_path).encode_chat(TALK)


def test_long_texts_are_encoded_without_the_interpreter_lock(tiny_model: Path) -> None:
    """Other threads run meanwhile: a server's event loop, its engine. The ids are those of `encode`."""
    tokenizer, text = Tokenizer(tiny_model), "Ein Wörterbuch, 12 + 34; " * 20_000
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.0005):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    try:
        encoded = tokenizer._encode(text, add_special_tokens=False)
        during = turns - before
    finally:
        over.set()
        thread.join()
    assert during > 20
    assert encoded.ids == tokenizer._fast.encode(text, add_special_tokens=False).ids
