"""Metrics for Prometheus. What is counted here and in the engine is collected when its page is asked for."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crelle.engine.requests.output import Output
from crelle.engine.stats import Stats

_FIRST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RECENT = 1024  # sequences of which the median and the 99th percentile are shown
_WINDOW = 5.0  # seconds over which tokens per second are counted


class Rate:
    """How fast a count grows, over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def sample(self, count: int, now: float | None = None) -> None:
        """Take note of a count; to be called about once a second."""
        now = monotonic() if now is None else now
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()

    def per_second(self, count: int, now: float | None = None) -> float:
        now = monotonic() if now is None else now
        if not self._seen or now - self._seen[0][0] < 0.1:
            return 0.0
        then, before = self._seen[0]
        return (count - before) / (now - then)


class Metrics:
    """What the server counts itself; the engine's counts come from its Stats. No other server's are on its page."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.first = histogram(
            "crelle_time_to_first_token_seconds", "time from the arrival of a request to its first token", _FIRST
        )
        self.recent_first: deque[float] = deque(maxlen=_RECENT)
        self.each = histogram(
            "crelle_time_per_token_seconds", "mean time per token of a sequence, after the first token", _EACH
        )
        self.speed, self.finishing = Rate(), Rate()
        self.running = self.waiting = 0  # HTTP requests for completions with, and still without, a first token
        self.prompt_tokens = 0
        self.disconnects = self.slow_readers = self.timeouts = 0

    def answered(self, path: str, status: int) -> None:
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def finished(self, output: Output) -> None:
        """Take note of a sequence's times."""
        done = output.completion
        if done.tokens:
            self.first.observe(done.first_token_seconds)
            self.recent_first.append(done.first_token_seconds)
        if done.tokens_per_second > 0:
            self.each.observe(1 / done.tokens_per_second)

    def sample(self, stats: Stats) -> None:
        self.speed.sample(stats.tokens_sampled)
        self.finishing.sample(stats.finished)

    def retry_after(self, stats: Stats) -> int:
        """Guess when a place in the queue will be free: when all that wait have been served."""
        rate = self.finishing.per_second(stats.finished)
        return 1 if not stats.waiting else min(60, max(1, round(stats.waiting / rate))) if rate > 0 else 10

    def page(self, stats: Stats, queue_limit: int | None, ready: bool) -> bytes:
        """Return the page that Prometheus reads."""
        now: list[tuple[str, str, float]] = [
            ("crelle_ready", "1 while the server accepts requests", int(ready)),
            ("crelle_queue_length", "waiting prompts", stats.waiting),
            (
                "crelle_queue_limit",
                "maximum number of waiting prompts; -1: no limit",
                -1 if queue_limit is None else queue_limit,
            ),
            ("crelle_texts_running", "running sequences", stats.running),
            ("crelle_requests_running", "HTTP requests after their first token", self.running),
            ("crelle_requests_waiting", "HTTP requests before their first token", self.waiting),
            ("crelle_kv_pages", "pages in the KV cache", stats.pages),
            ("crelle_kv_pages_used", "pages used by running sequences", stats.pages_used),
            ("crelle_kv_pages_cached", "pages kept for prefix sharing", stats.pages_cached),
            (
                "crelle_tokens_per_second",
                "sampled tokens per second, over the last 5 s",
                self.speed.per_second(stats.tokens_sampled),
            ),
        ]
        ever: list[tuple[str, str, float]] = [
            ("crelle_steps_total", "engine steps", stats.steps),
            ("crelle_tokens_run_total", "tokens that the model processed", stats.tokens_run),
            ("crelle_tokens_drawn_total", "sampled tokens", stats.tokens_sampled),
            ("crelle_draft_tokens_total", "tokens that were guessed and verified", stats.tokens_drafted),
            ("crelle_accepted_tokens_total", "guessed tokens that were right", stats.tokens_accepted),
            ("crelle_tokens_reused_total", "prompt tokens found in the prefix cache", stats.tokens_reused),
            ("crelle_prompt_tokens_total", "tokens of accepted prompts", self.prompt_tokens),
            ("crelle_expert_uses_total", "experts that tokens took, where experts are streamed", stats.expert_uses),
            ("crelle_expert_hits_total", "experts taken that were in GPU memory", stats.expert_hits),
            ("crelle_preemptions_total", "preemptions of sequences", stats.preemptions),
            ("crelle_texts_finished_total", "finished sequences, for any reason", stats.finished),
            ("crelle_texts_failed_total", "sequences that failed because of a server fault", stats.failed),
            (
                "crelle_disconnects_total",
                "clients that disconnected before the end of their response",
                self.disconnects,
            ),
            ("crelle_slow_readers_total", "streams closed because the client did not read them", self.slow_readers),
            ("crelle_timeouts_total", "requests that timed out", self.timeouts),
            ("crelle_prefill_seconds_total", "time in steps with prompt tokens", stats.prefill_seconds),
            ("crelle_decode_seconds_total", "time in decode-only steps", stats.decode_seconds),
        ]
        requests = CounterMetricFamily(
            "crelle_requests_total",
            "HTTP requests by path and status; 499: the client disconnected",
            labels=["path", "status"],
        )
        for (path, status), count in sorted(self.requests.items()):
            requests.add_metric([path, str(status)], count)
        first = GaugeMetricFamily(
            "crelle_recent_time_to_first_token_seconds",
            f"time to the first token of the last {_RECENT} sequences",
            labels=["quantile"],
        )
        for share, seconds in quantiles(self.recent_first, (0.5, 0.99)):
            first.add_metric([str(share)], seconds)
        found: list[Metric] = [GaugeMetricFamily(name, says, value) for name, says, value in now]
        found += [CounterMetricFamily(name, says, value) for name, says, value in ever]
        return generate_latest(_Collected([*found, requests, first, *self.first.collect(), *self.each.collect()]))


def quantiles(values: Iterable[float], shares: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield the values below which these shares of all lie; nothing of no values."""
    if ordered := sorted(values):
        for share in shares:
            yield share, ordered[round(share * (len(ordered) - 1))]


class _Collected(Collector):
    """What was collected, without the times at which histograms were made: the page has none of the counters'."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def histogram(name: str, says: str, bounds: tuple[float, ...]) -> Histogram:
    """Return a histogram that is in no registry: the library's own would be shared by all servers of a process."""
    return Histogram(name, says, buckets=bounds, registry=None)
