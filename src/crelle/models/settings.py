"""What the keys of a model's config.json may be: one table of types and ranges for all families.

A config comes from anywhere, and its values become sizes of tensors and lengths of loops. So each one is looked up
here, where a value of the wrong type or out of its range becomes a sentence with the key, the value and the range.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crelle.errors import FormatError
from crelle.formats.kv.format import MAX_LAYERS
from crelle.formats.storage.io import shown

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: a default of None stands for "not given"; a null in the file is the same as no key."""

    kind: type
    low: float = 0
    high: float = 0
    default: Any = _REQUIRED
    means: str = ""


SETTINGS = {
    "hidden_size": Setting(int, 1, 1 << 20, means="width of the residual stream"),
    "intermediate_size": Setting(int, 1, 1 << 22, means="width of the feed-forward"),
    "ffn_dim": Setting(int, 1, 1 << 22, means="width of the feed-forward"),
    "num_hidden_layers": Setting(int, 1, MAX_LAYERS, means="layers"),
    "num_attention_heads": Setting(int, 1, 1 << 14, means="query heads"),
    "num_key_value_heads": Setting(int, 1, 1 << 14, None, "key and value heads; default: as many as query heads"),
    "head_dim": Setting(int, 2, 1 << 12, None, "width of a head; default: hidden_size / num_attention_heads"),
    "vocab_size": Setting(int, 1, 1 << 24, means="rows of the embedding"),
    "word_embed_proj_dim": Setting(int, 1, 1 << 20, None, "width of OPT's embedding; default: hidden_size"),
    "max_position_embeddings": Setting(int, 1, 1 << 30, 2048, "tokens of the context"),
    "rms_norm_eps": Setting(float, 0, 1, 1e-6, "added to the mean square in norms"),
    "hidden_act": Setting(str, default="silu", means="activation of the feed-forward"),
    "activation_function": Setting(str, default="relu", means="activation of OPT's feed-forward"),
    "tie_word_embeddings": Setting(bool, default=False, means="the head is the embedding"),
    "enable_bias": Setting(bool, default=True, means="OPT's linears have biases"),
    "layer_norm_elementwise_affine": Setting(bool, default=True, means="OPT's norms have weights and biases"),
    "do_layer_norm_before": Setting(bool, default=True, means="OPT's norms stand before attention and feed-forward"),
    "_remove_final_layer_norm": Setting(bool, default=False, means="OPT has no last norm"),
    "sliding_window": Setting(int, 1, 1 << 30, None, "tokens that attention sees"),
    "use_sliding_window": Setting(bool, default=None, means="whether the window is used"),
    "max_window_layers": Setting(int, 0, 1 << 16, 28, "the first layer with a window (Qwen)"),
    "layer_types": Setting(list, default=None, means="full_attention or sliding_attention, for each layer"),
    "rope_parameters": Setting(dict, default=None, means="rotary positions"),
    "rope_scaling": Setting(dict, default=None, means="rotary positions, as older files have it"),
    "rope_theta": Setting(float, 1, 1e15, 10000.0, "base of the rotary frequencies"),
    "rope_type": Setting(str, default=None, means="scaling of the rotary frequencies"),
    "type": Setting(str, default="default", means="scaling of the rotary frequencies, as older files have it"),
    "factor": Setting(float, 1e-3, 1e6, means="of the scaling of rotary frequencies"),
    "low_freq_factor": Setting(float, 1e-3, 1e6, means="of Llama 3's scaling of rotary frequencies"),
    "high_freq_factor": Setting(float, 1e-3, 1e6, means="of Llama 3's scaling of rotary frequencies"),
    "partial_rotary_factor": Setting(float, 0, 1, 1.0, "share of a head's channels that are rotated"),
    "attention_factor": Setting(float, 1e-3, 1e3, None, "of the rotated queries and keys"),
    "beta_fast": Setting(float, 1e-3, 1e6, 32.0, "turns of the channels that yarn leaves as they are"),
    "beta_slow": Setting(float, 1e-3, 1e6, 1.0, "turns of the channels that yarn divides"),
    "truncate": Setting(bool, default=True, means="yarn's range of channels is rounded to whole ones"),
    "mscale": Setting(float, 0, 1e3, None, "of yarn's factor of queries and keys"),
    "mscale_all_dim": Setting(float, 0, 1e3, None, "of yarn's factor of queries and keys"),
    "short_factor": Setting(list, means="divisors of the rotary frequencies within the original context"),
    "original_max_position_embeddings": Setting(int, 1, 1 << 30, means="context before the scaling"),
}
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "an object"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def setting(config: Mapping[str, Any], key: str, default: Any = None, table: Mapping[str, Setting] = SETTINGS) -> Any:
    """Return a checked value of a config; `default` goes before the table's own. Families have tables of their own."""
    known = table[key]
    value = config.get(key)
    if value is None:
        found = known.default if default is None else default
        if found is _REQUIRED:
            raise FormatError(f"the model's config lacks the key '{key}' ({known.means})")
        return found
    fits = type(value) is known.kind or (known.kind is float and type(value) is int)
    ranged = known.kind in (int, float)
    if not fits or (ranged and not known.low <= value <= known.high):  # NaN is in no range
        span = f" from {known.low:,} to {known.high:,}" if ranged else ""
        raise FormatError(f"'{key}' ({known.means}) should be {_NAMES[known.kind]}{span}, but is {shown(value)}")
    return float(value) if known.kind is float else value


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Return the kind of attention of each layer, where the config says it."""
    kinds: list[str] | None = setting(config, "layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise FormatError(f"'layer_types' has {len(kinds)} entries, but 'num_hidden_layers' is {layers}")
        if odd := [k for k in kinds if k not in _LAYER_TYPES]:
            raise FormatError(f"'layer_types' should name {' or '.join(_LAYER_TYPES)}, but has {shown(odd[0])}")
    return kinds


def token_ids(value: Any, where: str) -> frozenset[int]:
    """Return the ids of an `eos_token_id`: an integer, a list of integers, or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if odd := [i for i in ids if type(i) is not int]:
        raise FormatError(f"{where}: 'eos_token_id' should be an integer or a list of them, but has {shown(odd[0])}")
    return frozenset(ids)
