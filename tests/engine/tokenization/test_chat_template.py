"""Templates give the text that transformers gives, and stop where they would run for ever or fill the memory."""

# ruff: noqa: E501  (templates)
import json
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tokenizer
from transformers import AutoTokenizer

from crelle.engine.tokenization.chat_template import ChatTemplate
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import UnsupportedError

LLAMA3 = (
    "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}"
    "\n    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start|>system\\n\\n' ~ system_message ~ '<|end|>' }}\n{%- for message in messages %}\n"
    "    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}\n"
    "        {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}\n"
    "    {%- else %}\n        {{- message.content | tojson }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant\\n\\n' }}\n{%- endif %}\n"
)
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{%- set ns = namespace(index=0, text='') %}{%- set loop_messages = messages|rejectattr('role', 'equalto', 'system')|list %}"
    "{{- bos_token }}{%- for message in loop_messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- if message['role'] == 'user' %}"
    "{%- set ns.index = ns.index + 1 %}{{- '[INST] ' ~ message['content'] ~ ' [/INST]' }}{%- else %}"
    "{{- ' ' + message['content'].strip() + eos_token }}{%- endif %}{%- endfor %}{{ ns.index }}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
DIALECT = (  # what else templates use
    "{% macro tag(name, text='') -%}<{{ name }}>{{ text|upper }}</{{ name }}>{%- endmacro %}\n"
    "  {% generation %}{{ tag('a', text=messages[-1].content) }}{% set inner = 1 %}{% endgeneration %}\n"
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}{% break %}{% endif %}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ messages|map(attribute='role')|join('-') }}{{ messages[::-1][0].role }}"
    "{{ {'a': [1, 2.5, none, true], 'é': '<&>'}|tojson(indent=2) }}{{ [1, 2] + [3] }}{{ (1, 'b') }}{{ 7 // 2 ** 2 }}"
    "{{ '%s is %05.1f' % ('x', 2) }}{{ 'a-{}-{b}'.format(1, b=2) }}{{ messages|length }}{{ 'x' * 3 }}{{ tools is none }}"
    "{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}={{ v }};{% endfor %}{{ undefined_thing }}{{ 'a b'.split()|last }}"
    "{% set t %}{{ 'in block' }}{% endset %}{{ t|title }}{{ namespace(a=1).a }}{{ range(3)|list }}{{ [[1], [2]]|sum(start=0) if false }}"
    "{% filter upper %}shout{% endfilter %}{{ joiner(', ')() }}{{ messages|selectattr('role', 'in', ['user'])|list|count }}"
    "{% macro wrap() %}[{{ caller('z') }}]{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}{{ strftime_now('%Y') }}{{ 'abc'[1:] }}{{ messages|groupby('role')|length }}{{ -3|abs }}"
    "{{ 'a\nb'|indent(2) }}{{ 'x'|center(5) }}|{{ 3.14159|round(2) }}{{ ['b', 'a']|sort|join }}{{ 'aXbX'.replace('X', '') }}"
)
TALK = [
    {"role": "system", "content": " Be <short> & é. "},
    {"role": "user", "content": "Hé? \n"},
    {"role": "assistant", "content": " yes "},
    {"role": "user", "content": "'quoted' \"text\""},
]
PLAIN = [*TALK[1:]]


def tokenizer(to: Path, template: Any, **config: Any) -> Path:
    write_tokenizer(to)
    file = to / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template} | config))
    return to


@pytest.mark.parametrize(
    "template", [LLAMA3, CHATML, MISTRAL, GEMMA, DIALECT], ids=["llama3", "chatml", "mistral", "gemma", "all"]
)
@pytest.mark.parametrize("talk", [TALK, PLAIN, TALK[1:2]])
def test_text_is_that_of_transformers(template: str, talk: list[dict[str, str]], tmp_path: Path) -> None:
    peer = AutoTokenizer.from_pretrained(tokenizer(tmp_path, template))
    expected = peer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ours = Tokenizer(tmp_path)
    assert ours._template.render(talk, ours._special) == expected
    assert ours.encode_chat(talk) == peer(expected, add_special_tokens=False)["input_ids"]


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    ours = Tokenizer(tokenizer(tmp_path, named))
    assert ours.decode(ours.encode_chat([{"role": "user", "content": "abc"}])) == "abc"


def test_special_tokens_of_older_files_and_of_classes_are_known(tmp_path: Path) -> None:
    tokenizer(
        tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}", tokenizer_class="LlamaTokenizer"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    ours = Tokenizer(tmp_path)
    assert ours._template.render([], ours._special) == "<|bos|>|<|end|>|<unk>|"


def test_a_chat_of_20_messages_is_rendered_within_20_milliseconds() -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " * 200} for i in range(20)]
    for source in (LLAMA3, CHATML, MISTRAL, GEMMA):
        template = ChatTemplate(source)
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        template.render(talk, special)
        began = time.thread_time()
        template.render(talk, special)
        assert time.thread_time() - began < 0.02


def test_a_long_conversation_is_within_the_budget() -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(1000)]
    assert len(ChatTemplate(CHATML).render(talk, {})) > 10**6


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
        ("{{ 'a' * 10**10 }}", "makes more than 256 MB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
        (
            "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "makes more than",
        ),
        (
            "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
            "takes more than",
        ),
    ],
)
def test_template_without_end_is_stopped(template: str, words: str) -> None:
    """tests/hostile/corpus_tokenizers.py has many more."""
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnsupportedError, match=words):
        ChatTemplate(template).render(TALK, {})
    assert time.thread_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10


def test_no_part_of_loading_opens_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate("abc<|endoftext|>")}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "_name_or_path": "meta-llama/Llama-2-7b"}')
    assert len(Tokenizer(tmp_path).encode("abc")) == 3
