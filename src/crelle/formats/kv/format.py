"""KVFormat: the bits of keys and values, by layer; crelle.formats.kv.pages defines what they mean."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from crelle.errors import SchemeError
from crelle.formats.kv.codes import row_bytes
from crelle.formats.storage.io import shown

GROUPS = {2: 32, 3: 32, 4: 32, 8: 64, 16: 0}  # default group by bits
MAX_LAYERS = 1 << 12  # of a model
MAX_PAGE = 1 << 12  # tokens
_DIGITS = 9  # of a number in a format: a checkpoint's may have millions
_FLAGS = {"true": True, "false": False}
_BITS = re.compile(r"(?:kv)?=?(\d+)|k(\d+)v(\d+)")
_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")
_FORMS = "16, 8, 4, 3, 2, k4v2, kv4:group=64,center=false or 4,layers.0=8,layers.28-29=k8v4"


@dataclass(frozen=True, slots=True)
class KVCode:
    """How one of both, keys or values, is stored."""

    bits: int
    group: int
    rotate: bool

    @property
    def coded(self) -> bool:
        """Whether codes are stored, not floats."""
        return self.bits < 16

    def groups(self, head_size: int) -> int:
        """Return C: the most equal groups of a head with at least `group` channels each, an even number."""
        if not self.coded:
            return 0
        return next(
            (c for c in range(head_size // self.group, 0, -1) if head_size % c == 0 and head_size // c % 2 == 0), 1
        )

    def row_bytes(self, head_size: int, element_size: int = 2) -> int:
        """Return the bytes of a head's codes, or floats of so many bytes."""
        return row_bytes(self.bits, head_size) if self.coded else head_size * element_size


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache stores keys and values. Round-trips with a short string.

        kv16, kv8, kv4, kv3, kv2            keys and values alike
        k4v2                                keys of 4 bits, values of 2
        kv4:group=64,center=false           with settings
        kv4,layers.0=8,layers.28-29=k8v4    other bits for some layers, the same settings

    What buys accuracy, and its price:
        group    channels that share scale and zero: 16/group bits per value
        rotate   spreads large channels over all (H above): no bits; D log2 D sums for each head of q, k, v and result
        center   takes the mean from keys (c above): no bits; the model has to run over 256 tokens once to find it
        page     tokens of a page: no bits; smaller wastes less of each sequence's last page
    """

    bits: int = 16  # of keys
    group: int = 0  # 0: what GROUPS has for the bits
    rotate: bool = True
    center: bool = True
    page: int = 16
    v_bits: int = field(default=0, kw_only=True)  # of values; 0: as keys
    overrides: tuple[tuple[int, "KVFormat"], ...] = field(default=(), kw_only=True)  # (layer, its format), in order

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_bits", self.v_bits or self.bits)
        for bits in (self.bits, self.v_bits):
            if bits not in GROUPS:
                raise SchemeError(f"a KV cache must have 16, 8, 4, 3 or 2 bits, got {bits}")
        usual: dict[str, int | bool] = {}
        if self.bits == self.v_bits == 16:  # values as they are
            usual = {"group": 0, "rotate": False, "center": False}
        elif self.group == 0 and self.bits == self.v_bits:
            usual = {"group": GROUPS[self.bits]}
        elif self.bits == 16:
            usual = {"center": False}
        for name, value in usual.items():
            object.__setattr__(self, name, value)
        if self.group and self.group < 8:
            raise SchemeError(f"a group of a KV cache must have at least 8 channels, got {self.group}")
        if not 1 <= self.page <= MAX_PAGE:
            raise SchemeError(f"a page must have 1 to {MAX_PAGE} tokens, got {shown(self.page)}")
        if any(other.page != self.page or other.overrides for _, other in self.overrides):
            raise SchemeError(f"all layers of a KV cache must have pages of {self.page} tokens")
        plain = replace(self, overrides=()) if self.overrides else self
        kept = sorted((i, other) for i, other in dict(self.overrides).items() if other != plain)
        object.__setattr__(self, "overrides", tuple(kept))

    @classmethod
    def parse(cls, text: "str | int | KVFormat") -> "KVFormat":
        """Read 4, kv4, kv=4, k4v2, kv4:group=64,center=false or 4,layers.0=8; a format stays as it is."""
        if isinstance(text, cls):
            return text
        whole = shown(str(text))
        name, *items = re.split("[:,]", str(text).strip())
        bits = _bits(name, whole)
        settings: dict[str, int | bool] = {}
        layers: dict[int, tuple[int, int]] = {}
        kinds = {n: bool if n in ("rotate", "center") else int for n in ("group", "rotate", "center", "page")}
        for item in filter(None, items):
            key, eq, value = (part.strip() for part in item.partition("="))
            if eq and (found := _LAYERS.fullmatch(key)):
                first, last = found[1], found[2] or found[1]
                if max(len(first), len(last)) > _DIGITS or int(last) >= MAX_LAYERS:
                    raise SchemeError(
                        f"in {whole}, {shown(key)} names layers above {MAX_LAYERS - 1}, which is the limit"
                    )
                these = range(int(first), int(last) + 1)
                if not these or layers.keys() & set(these):
                    raise SchemeError(f"in {whole}, {key} names {'a layer twice' if these else 'no layer'}")
                layers |= dict.fromkeys(these, _bits(value, whole))
                continue
            if key not in kinds or not eq:
                named = ", ".join(f"{k}=…" for k in (*kinds, "layers.N"))
                raise SchemeError(f"in {whole}, {shown(item)} should be one of {named}")
            if key in settings:
                raise SchemeError(f"in {whole}, {key} is given twice")
            flag = kinds[key] is bool
            if value not in _FLAGS if flag else not (value.isdecimal() and len(value) <= _DIGITS):
                wanted = "true or false" if flag else f"an integer of at most {_DIGITS} digits"
                raise SchemeError(f"in {whole}, {key} must be {wanted}")
            settings[key] = _FLAGS[value] if flag else int(value)
        every = [bits, *layers.values()]
        if all(both == (16, 16) for both in every) and settings.keys() - {"page"}:
            raise SchemeError(f"{whole}: with 16 bits only page can be set")

        def made(k: int, v: int) -> KVFormat:
            return cls(k, v_bits=v, **settings)  # type: ignore[arg-type]

        return replace(made(*bits), overrides=tuple((i, made(*both)) for i, both in layers.items()))

    def __str__(self) -> str:
        every = [self, *(other for _, other in self.overrides)]
        plain = [KVFormat(f.bits, v_bits=f.v_bits) for f in every]
        other = []
        for name in ("group", "rotate", "center", "page"):
            said = [getattr(f, name) for f, p in zip(every, plain, strict=True) if getattr(f, name) != getattr(p, name)]
            other += [f"{name}={str(said[0]).lower()}"] if said else []
        text = f"{self._name('kv')}:{','.join(other)}" if other else self._name("kv")
        return ",".join([text, *_runs(self.overrides)])

    def _name(self, prefix: str = "") -> str:
        return f"{prefix}{self.bits}" if self.bits == self.v_bits else f"k{self.bits}v{self.v_bits}"

    @property
    def coded_itself(self) -> bool:
        return min(self.bits, self.v_bits) < 16

    @property
    def coded(self) -> bool:
        """Whether some pages hold codes, not floats."""
        return self.coded_itself or any(other.coded_itself for _, other in self.overrides)

    @property
    def centered(self) -> bool:
        """Whether the keys of some layers are stored relative to a centre."""
        return self.center or any(other.center for _, other in self.overrides)

    @property
    def uniform(self) -> bool:
        """Whether keys and values of all layers are stored alike."""
        return self.bits == self.v_bits and not self.overrides

    @property
    def key(self) -> KVCode:
        return self.code(0)

    @property
    def value(self) -> KVCode:
        return self.code(1)

    def code(self, kind: int) -> KVCode:
        """Return how keys (0) or values (1) are stored, in layers without a format of their own."""
        bits = self.v_bits if kind else self.bits
        return KVCode(bits, 0 if bits == 16 else self.group or GROUPS[bits], self.rotate and bits < 16)

    def layers(self, count: int) -> "list[KVFormat]":
        """Return the format of each of a model's layers."""
        if self.overrides and (last := self.overrides[-1][0]) >= count:
            raise SchemeError(f"the KV cache '{self}' names layer {last}; the model has layers 0 to {count - 1}")
        found = [replace(self, overrides=()) if self.overrides else self] * count
        for i, other in self.overrides:
            found[i] = other
        return found

    def bits_per_value(self, head_size: int, element_size: int = 2) -> float:
        """Return what a value of a layer costs, scales and zeros counted; `element_size`: bytes of 16-bit values."""
        codes = (self.key, self.value)
        return sum(8 * c.row_bytes(head_size, element_size) + 16 * c.groups(head_size) for c in codes) / (2 * head_size)

    def page_bytes(self, heads: int, head_size: int, element_size: int = 2) -> int:
        """Return the bytes of one page of one layer, keys and values."""
        codes = PageLayout.of(self, heads, head_size, element_size)
        return codes.bytes + 2 * codes.words

    def check(self, head_size: int) -> None:
        """Refuse a head that cannot be stored."""
        if self.coded and head_size % 2:
            raise SchemeError(f"{self} packs channels in pairs, but a head has {head_size} channels")


def _bits(text: str, whole: str) -> tuple[int, int]:
    """Read 4, kv4 or k4v2: bits of keys and of values."""
    found = _BITS.fullmatch(text.strip())
    k, v = (found[1] or found[2], found[1] or found[3]) if found else ("", "")
    if k not in map(str, GROUPS) or v not in map(str, GROUPS):
        raise SchemeError(f"a KV cache must be one of {_FORMS}, got {whole}")
    return int(k), int(v)


def _runs(overrides: tuple[tuple[int, KVFormat], ...]) -> list[str]:
    """Write layers.0=8 or layers.3-5=8 for each run of layers with one format."""
    runs: list[tuple[int, int, KVFormat]] = []
    for i, fmt in overrides:
        if runs and runs[-1][1] == i - 1 and runs[-1][2] == fmt:
            runs[-1] = runs[-1][0], i, fmt
        else:
            runs.append((i, i, fmt))
    return [f"layers.{a if a == b else f'{a}-{b}'}={fmt._name()}" for a, b, fmt in runs]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where keys and values of one page lie."""

    rows: tuple[int, int]  # bytes of a head's codes or floats
    groups: tuple[int, int]
    values_at: int  # bytes from the page's begin
    bytes: int  # of codes and floats of a page
    words: int  # of a page

    @classmethod
    def of(cls, fmt: KVFormat, heads: int, head_size: int, element_size: int) -> "PageLayout":
        k, v = (c.row_bytes(head_size, element_size) for c in (fmt.key, fmt.value))
        groups = fmt.key.groups(head_size), fmt.value.groups(head_size)
        values_at, end, tokens = heads * fmt.page * k, heads * fmt.page * (k + v), heads * fmt.page
        if fmt.bits != fmt.v_bits:
            values_at = -(-values_at // 16) * 16
            end = -(-(values_at + tokens * v) // 16) * 16
        return cls((k, v), groups, values_at, end, tokens * sum(groups))


def kv_of_checkpoint(config: Mapping[str, Any]) -> KVFormat:
    """Return the cache that a checkpoint's scheme was made for (`atom:…,kv=4`); 16 bits where it says nothing."""
    stored = config.get("quantization_config")
    scheme = stored.get("scheme") if isinstance(stored, Mapping) and stored.get("quant_method") == "crelle" else None
    settings = dict(item.partition("=")[::2] for item in str(scheme or "").partition(":")[2].split(","))
    return KVFormat.parse(settings.get("kv", "16"))
