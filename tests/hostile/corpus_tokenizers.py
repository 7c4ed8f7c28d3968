"""Hostile tokenizers and chat templates."""

# ruff: noqa: E501  (a case on a line)
import json
from pathlib import Path
from typing import Any

from corpus_base import case, edit, tiny

# Tokenizers ----------------------------------------------------------------------------------------------------------


def tokenizer(name: str, words: str | None, json_changes: dict[str, Any] | None = None, **said: Any) -> None:
    def build(to: Path) -> Path:
        tiny(to, tokenizer=json_changes is not None)
        edit(to / "tokenizer_config.json", **said)
        if json_changes:
            edit(to / "tokenizer.json", **json_changes)
        return to

    case(f"tokenizer: {name}", words, build)


AUTO = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
tokenizer("auto_map beside a tokenizer.json", None, {}, auto_map=AUTO, tokenizer_class="Evil")
tokenizer("auto_map alone", "needs Python code", auto_map=AUTO, tokenizer_class="Evil")
tokenizer("auto_map as a list", "needs Python code", auto_map=["tokenization_evil.Evil", None])
tokenizer("auto_map of another repository", "needs Python code", auto_map={"AutoTokenizer": ["evil/r--t.Evil", None]})
tokenizer("a class that unpickles", "tokenizer class 'TransfoXLTokenizer'", tokenizer_class="TransfoXLTokenizer")
tokenizer("a class that is no name", "tokenizer class", tokenizer_class={"a": 1})
tokenizer("nothing at all", "has no tokenizer")
tokenizer("special token as a number", "'bos_token' must be a valid Unicode string", {}, bos_token=7)
tokenizer(
    "half a surrogate pair", "'bos_token' must be a valid Unicode string", {}, bos_token="\ud800", add_bos_token=True
)
tokenizer("add_bos_token as text", "'add_bos_token' must be true or false", {}, add_bos_token="yes")
tokenizer("cut and padded", None, {
    "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                "pad_token": "!"}})  # fmt: skip
BAD_SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
tokenizer("a pattern that backtracks", "can take forever", {"pre_tokenizer": BAD_SPLIT})
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
DOUBLES = {"type": "Sequence", "normalizers": [DOUBLE] * 29}
tokenizer("a text that doubles 29 times", "can expand one character", {"normalizer": DOUBLES})
tokenizer(
    "ids beyond the model",
    "outside the vocabulary",
    {"model": {"type": "WordLevel", "vocab": {"Hi": 4294967295, "u": 4294967294}, "unk_token": "u"}},
)
tokenizer(
    "merges of nothing",
    "not a readable tokenizer",
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
)


def from_vocabulary(to: Path) -> Path:
    """Vocabulary files only, and a config that lures transformers to code."""
    tiny(to, tokenizer=False, auto_map={"AutoConfig": "configuration_evil.Evil"}, _name_or_path="evil/repository")
    (to / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate("Hi abcdeuslortn")}))
    (to / "merges.txt").write_text("#version: 0.2\n")
    (to / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return to


def broken_vocabulary(to: Path) -> Path:
    from_vocabulary(to)
    (to / "vocab.json").write_text("[[[")
    return to


def broken_sentencepiece(to: Path) -> Path:
    tiny(to, tokenizer=False)
    edit(to / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    (to / "tokenizer.model").write_bytes(b"\x80\x04\x95" + b"\xff" * 1000)
    return to


case("tokenizer: vocabulary files beside foreign code", None, from_vocabulary)
case("tokenizer: broken vocabulary", "that transformers can load", broken_vocabulary)
case("tokenizer: broken sentencepiece", "that transformers can load", broken_sentencepiece)


# Templates -----------------------------------------------------------------------------------------------------------

GROW = "{% set ns = namespace(s='aaaaaaaaaa', l=[1]) %}{% for i in range(60) %}"
TEMPLATES: dict[str, tuple[str, str]] = {
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "filtered loops": ("{% for i in range(99999) if i > 10**6 %}{% endfor %}" * 99, "takes more than"),
    "a long string": ("{{ 'a' * 10**10 }}", "makes more than"),
    "a long list": ("{{ [0] * 10**10 }}", "makes more than"),
    "an enormous integer": ("{{ (10**400)**(10**9) }}", "enormous integer"),
    "doubling by ~": (GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}", "makes more than"),
    "doubling by +": (GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}", "makes more than"),
    "doubling by blocks": (GROW + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}", "makes more"),
    "lists of lists": (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}", "takes more than"),
    "objects of objects": (GROW + "{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l|tojson }}", "takes more than"),
    "namespaces": (GROW + "{% set ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}", "takes more than"),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
    "branching macro": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "takes more"),
    "endless block": ("{% block a %}{{ self.a() }}{% endblock %}", "recurses without end"),
    "endless recursive loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recurses without end"),
    "wide format": ("{{ '%1000000000d' % 1 }}", "width"),
    "wide format method": ("{{ '{:1000000000d}'.format(1) }}", "width"),
    "computed width": ("{{ '%*d' % (10**9, 1) }}", "width"),
    "wide filter": ("{{ 'a'|center(10**10) }}", "width"),
    "wide method": ("{{ 'a'.ljust(10**10) }}", "width"),
    "wide indent": ("{{ 'a\nb'|indent(10**9) }}", "width"),
    "wide JSON": ("{{ [1]|tojson(indent=10**9) }}", "width"),
    "wide batch": ("{{ [1]|batch(10**9, 0)|list }}", "width"),
    "join": ("{% set l = ['a' * 99999] * 9999 %}{{ l|join }}", "makes a list"),
    "join method": ("{% set l = ['a' * 99999] * 9999 %}{{ ''.join(l) }}", "makes a list"),
    "replace": ("{% set l = 'a' * 99999 %}{{ l|replace('a', l) }}", "makes more than"),
    "replace method": ("{% set l = 'a' * 99999 %}{{ l.replace('a', l) }}", "makes more than"),
    "sum of lists": ("{{ ([[1] * 999] * 999)|sum(start=[]) }}", "not numbers|takes more"),
    "sorting": ("{% for i in range(9999) %}{% set x = range(99999)|sort %}{% endfor %}", "takes more than"),
    "sorting of long strings": ("{% set a = 'a' * 10**6 %}{% set b = a ~ 'a' %}{{ ([a, b] * 50000)|sort|length }}", "makes a list"),
    "searching of long strings": ("{% set a = 'a' * 10**6 %}{{ (a ~ 'a') in [a ~ 'b'] * 10**6 }}", "makes a list|takes more"),
    "much output": ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "far more text"),
    "Python's internals": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "internals by a filter": ("{{ (''|attr('__class__')).mro() }}", "unsafe|undefined"),
    "internals by a format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "functions' internals": ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
    "bytes": ("{{ (1).to_bytes(10**10, 'big') }}", "unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "deep parentheses": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "recurses without end"),
    "deep blocks": ("{% for i in [1] %}" * 200 + "{% endfor %}" * 200, "nests more than"),
    "a template of 100,000 characters": ("{% if 1 %}{{ 1 }}{% endif %}" * 4000, "65,536 are allowed"),
    "syntax": ("{{ ", "rejects this conversation"),
}  # fmt: skip
for name, (text, words) in TEMPLATES.items():
    tokenizer(f"template with {name}", words, {}, chat_template=text)
tokenizer("template as a number", "'chat_template' must be a string", {}, chat_template=7)
tokenizer("a template without a name", "none is named 'default'", {}, chat_template=[{"template": "a"}])
tokenizer("templates without a default", "none is named 'default'", {}, chat_template=[{"name": "x", "template": "a"}])
