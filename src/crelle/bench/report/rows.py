"""What result files say, as typed rows: one class for each kind of figure on the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from crelle.bench.planner.cost import CURRENCY

OURS, PEER, REFERENCE = "ours", "peer", "reference"  # whose figure it is; a reference is full precision


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from."""

    file: str
    command: str
    date: str
    machine: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file, or a row of one, that the report does not show, and why."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexity of a model at some bits per weight."""

    source: Source
    model: str
    text: str
    scheme: str
    bits: float
    ratio: float  # to full precision, on the same text
    perplexity: float | None = None
    who: str = ""  # a peer's name; '': Crelle


@dataclass(frozen=True, slots=True)
class CacheQuality:
    """Perplexity with a quantized KV cache."""

    source: Source
    model: str
    kv: str
    bits: float  # per value of the cache
    ratio: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Zero-shot accuracy at some bits per weight, by task."""

    source: Source
    model: str
    scheme: str
    bits: float
    tasks: Mapping[str, tuple[float, float]]  # accuracy, its standard error

    @property
    def mean(self) -> float:
        return sum(accuracy for accuracy, _ in self.tasks.values()) / len(self.tasks)


@dataclass(frozen=True, slots=True)
class Ablation:
    """Perplexity after one more, or one other, ingredient of a scheme."""

    source: Source
    model: str
    name: str
    bits: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product."""

    source: Source
    device: str
    setting: str  # threads, working set, what is counted
    shape: tuple[int, int]
    batch: int
    scheme: str
    kernel: str
    bytes: float | None  # of the weight with its scales
    microseconds: float
    baseline: str
    baseline_microseconds: float
    peers: Mapping[str, float] = field(default_factory=dict)  # microseconds
    joules: float | None = None

    @property
    def speedup(self) -> float:
        return self.baseline_microseconds / self.microseconds


@dataclass(frozen=True, slots=True)
class Step:
    """One decoded token of one sequence, or of a small batch."""

    source: Source
    device: str
    model: str
    scheme: str
    setting: str
    batch: int
    tokens_per_second: float
    weight_bytes: float | None = None
    joules: float | None = None  # per token
    cost: float | None = None  # of a million tokens
    who: str = ""  # a peer's name; '': Crelle
    currency: str = CURRENCY

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.batch / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class Throughput:
    """Many sequences at once: a batch of a fixed size, clients, or a trace."""

    source: Source
    device: str
    model: str
    setting: str
    series: str
    over: str  # batch, clients or trace
    count: int | None
    tokens_per_second: float
    memory: str = ""
    first_token: tuple[float, float] | None = None  # seconds: median, 99th percentile
    whose: str = OURS


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a decode step over a paged cache."""

    source: Source
    device: str
    setting: str
    kv: str
    batch: int
    context: int
    microseconds: float
    torch_microseconds: float
    torch_kernel: str


@dataclass(frozen=True, slots=True)
class Quantizing:
    """How long quantizing a model takes."""

    source: Source
    model: str
    scheme: str
    seconds: float
    bits: float
    extrapolated: bool = False


Row = Quality | CacheQuality | Accuracy | Ablation | Product | Step | Throughput | Attention | Quantizing
