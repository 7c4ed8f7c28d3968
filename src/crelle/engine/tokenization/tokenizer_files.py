"""A tokenizer from the files of a model's directory, without running anything of theirs.

tokenizer.json is read by the `tokenizers` library. Where there is none, transformers builds a tokenizer from the
vocabulary: in a directory of our own that holds copies of the vocabulary files and a config with the few settings that
are known here. So whatever else lies in the model's directory (Python files, `auto_map`, names of other repositories)
is not there for transformers to find, `trust_remote_code` is off, and no question is asked on standard input.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from crelle.engine.tokenization.tokenizer_growth import MAX_GROWTH, MAX_TEMPLATE_TOKENS, growth, template_tokens
from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.storage.io import read_bounded, read_json, require_regular, shown
from crelle.formats.storage.rust import panics_are

MAX_TOKENIZER_BYTES = 128 << 20  # Gemma's tokenizer.json, among the largest, has 34 MB
MAX_TEMPLATE_BYTES = 1 << 20
_VOCABULARIES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
_CLASSES = {
    "CodeLlamaTokenizer",
    "GPT2Tokenizer",
    "LlamaTokenizer",
    "PreTrainedTokenizer",
    "Qwen2Tokenizer",
    "TokenizersBackend",
}
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SETTINGS = (*_SPECIAL, "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "legacy")
_CLASS_TOKENS = {  # what these classes of transformers have where a directory says nothing
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
_MAX_REPEATS = 3  # unbounded repeats in one alternative of a pattern; each one more is a power of the text's length


def load_fast(file: Path) -> Any:
    """Return the tokenizer in a tokenizer.json; prompts are neither truncated nor padded, whatever the file says."""
    from tokenizers import Tokenizer as Fast

    try:
        data = read_bounded(file, MAX_TOKENIZER_BYTES)
        with panics_are(f"{file} is not a readable tokenizer"):
            return plain(Fast.from_buffer(data), file)
    except CrelleError:
        raise
    except Exception as e:  # the library raises bare Exception
        raise FormatError(f"{file} is not a readable tokenizer: {shown(str(e), 300)}") from e


def plain(fast: Any, file: Path) -> Any:
    """Switch off what would change a prompt silently; refuse what could take for ever, or make texts enormous."""
    fast.no_truncation()
    fast.no_padding()
    said = (fast.normalizer, fast.pre_tokenizer, fast.decoder, fast.post_processor)
    before, split, after, around = (None if part is None else json.loads(part.__getstate__()) for part in said)
    if pattern := next(_patterns([before, split, after]), None):
        raise UnsupportedError(
            f"{file}: the pattern {shown(pattern)} has nested repeats, or more than {_MAX_REPEATS} repeats in a row, "
            "which can take forever on some text"
        )
    if (factor := max(growth(before, split), growth(after))) > MAX_GROWTH:
        raise UnsupportedError(
            f"{file}: its replacements can expand one character to {factor:.3g}; at most {MAX_GROWTH} are allowed"
        )
    if (tokens := template_tokens(around)) > MAX_TEMPLATE_TOKENS:
        raise UnsupportedError(
            f"{file}: its post-processor adds {tokens:,} tokens to a text; at most {MAX_TEMPLATE_TOKENS:,} are allowed"
        )
    return fast


def _patterns(value: Any) -> Any:
    """Yield the regular expressions in a part of a tokenizer that are too expensive; see `backtracks`."""
    if isinstance(value, dict):
        if isinstance(found := value.get("Regex"), str) and backtracks(found):
            yield found
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _patterns(part)


def backtracks(pattern: str) -> bool:
    """Tell whether matching a pattern may take time beyond a low power of the text's length.

    A scan, not a parse: repeats (`*`, `+`, `{2,}`) of groups that hold repeats, back references, and alternatives with
    more than three unbounded repeats count as such. The patterns of GPT-2, Llama 3, Qwen, DeepSeek and o200k do not.
    """
    stack, repeats, before, at = [[0, 0, False]], 0, "", 0  # of a group: repeats before it, most in it, any in it
    while at < len(pattern):
        c, rest = pattern[at], pattern[at + 1 : at + 2]
        if c == "\\":
            if (rest.isdigit() and rest != "0") or rest in ("k", "g"):
                return True
            named = rest in ("p", "P") and pattern[at + 2 : at + 3] == "{"
            at, before = (pattern.find("}", at) + 1 or len(pattern)) if named else at + 2, "atom"
            continue
        if c == "[":
            at, before = _class_end(pattern, at), "atom"
            continue
        if c == "(":
            stack.append([repeats, repeats, False])
            before = ""
        elif c == "|":
            stack[-1][1] = max(stack[-1][1], repeats)
            repeats, before = stack[-1][0], ""
        elif c == ")" and len(stack) > 1:
            _, most, inside = stack.pop()
            repeats, before = max(most, repeats), "group" if inside else "atom"
            stack[-1][2] = inside or stack[-1][2]
        elif c == "+" and before == "repeated":
            pass  # a possessive repeat: never gives back what it took
        elif c in "*+" or (c == "{" and (_open_ended(pattern, at) or before == "group")):
            repeats += 1
            if before == "group" or repeats > _MAX_REPEATS:
                return True
            stack[-1][2], before = True, "repeated"
        elif c in "?}":
            before = "repeated"
        elif c != "{":
            before = "atom"
        at += 1
    return False


def _open_ended(pattern: str, at: int) -> bool:
    """Tell whether `{` begins a repeat without a small upper bound."""
    inner = pattern[at + 1 : max(at, pattern.find("}", at))]
    low, comma, high = inner.partition(",")
    if not (low + high).isdigit():
        return False
    return (bool(comma) and not high) or int(high or low) > 16


def _class_end(pattern: str, at: int) -> int:
    """Return where a character class that begins at `at` ends; classes may hold classes."""
    depth, at = 1, at + 1
    if pattern[at : at + 1] == "^":
        at += 1
    first = at
    while at < len(pattern) and depth:
        c = pattern[at]
        if c == "\\":
            at += 1
        elif c == "[":
            depth += 1
        elif c == "]" and at != first:
            depth -= 1
        at += 1
    return at


def load_from_vocabulary(path: Path, config: dict[str, Any]) -> Any:
    """Return transformers' tokenizer for a directory that has vocabulary files and no tokenizer.json."""
    model = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    for file, said in (("tokenizer_config.json", config), ("config.json", model)):
        mapped = said.get("auto_map")
        if isinstance(mapped, list) or (isinstance(mapped, dict) and "AutoTokenizer" in mapped):
            raise UnsupportedError(
                f"{path / file}: the tokenizer needs Python code from that directory (auto_map), and there is no "
                "tokenizer.json; Crelle never runs a model's code. Save the tokenizer as tokenizer.json"
            )
    kind = config.get("tokenizer_class")
    if kind is not None and (not isinstance(kind, str) or kind.removesuffix("Fast") not in _CLASSES):
        known = ", ".join(sorted(_CLASSES))
        raise UnsupportedError(
            f"{path} has no tokenizer.json and names the tokenizer class {shown(kind)}; without tokenizer.json Crelle "
            f"supports: {known}"
        )
    present = [path / f for f in _VOCABULARIES if (path / f).exists()]
    if not any(f.name in ("tokenizer.model", "vocab.json") for f in present):
        raise FormatError(f"{path} has no tokenizer: neither tokenizer.json nor tokenizer.model nor vocab.json")
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="crelle-vocabulary-") as d:
        for f in present:
            if require_regular(f) > MAX_TOKENIZER_BYTES:
                raise FormatError(f"{f} has {f.stat().st_size:,} bytes; at most {MAX_TOKENIZER_BYTES:,} are allowed")
            shutil.copyfile(f, Path(d) / f.name)
        settings = {k: config[k] for k in _SETTINGS if k in config} | ({"tokenizer_class": kind} if kind else {})
        family = model.get("model_type") if isinstance(model.get("model_type"), str) else None
        for name, value in (("tokenizer_config.json", settings), ("config.json", {"model_type": family})):
            (Path(d) / name).write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
        try:
            with panics_are(f"{path} has no tokenizer that transformers can load"):
                tokenizer = AutoTokenizer.from_pretrained(d, local_files_only=True, trust_remote_code=False)
                plain(tokenizer.backend_tokenizer, path)
        except CrelleError:
            raise
        except Exception as e:  # whatever transformers and the vocabulary's parsers trip over
            why = shown(str(e).replace(d, str(path)), 300)
            raise FormatError(f"{path} has no tokenizer that transformers can load: {why}") from e
    return tokenizer


def special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may name, as strings."""
    file = path / "special_tokens_map.json"
    older = read_json(file) if file.exists() else {}
    kind = config.get("tokenizer_class")
    defaults = _CLASS_TOKENS.get(kind.removesuffix("Fast"), {}) if isinstance(kind, str) else {}
    found = {}
    for name in _SPECIAL:
        token = config[name] if name in config else older.get(name, defaults.get(name))
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and (not isinstance(token, str) or not _is_unicode(token)):
            raise FormatError(
                f"{path / 'tokenizer_config.json'}: '{name}' must be a valid Unicode string, got {shown(token)}"
            )
        if token is not None:
            found[name] = token
    return found


def _is_unicode(text: str) -> bool:
    """Tell whether a string is Unicode text: JSON can write halves of surrogate pairs, which are no characters."""
    return not any(0xD800 <= ord(c) < 0xE000 for c in text)


def template_source(path: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template: chat_template.jinja, or what tokenizer_config.json says, of several the default."""
    if (file := path / "chat_template.jinja").exists():
        try:
            return read_bounded(file, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as e:
            raise FormatError(f"{file} is not UTF-8 text") from e
    said = config.get("chat_template")
    if isinstance(said, list):
        named = {
            t.get("name"): t.get("template") for t in said if isinstance(t, dict) and isinstance(t.get("name"), str)
        }
        said = named.get("default")
        if said is None:
            raise UnsupportedError(
                f"{path / 'tokenizer_config.json'} has chat templates, but none is named 'default': "
                f"{shown(list(named))}"
            )
    if said is not None and not isinstance(said, str):
        raise FormatError(f"{path / 'tokenizer_config.json'}: 'chat_template' must be a string, got {shown(said)}")
    return said or None
