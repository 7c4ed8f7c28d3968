"""Result files of any kind → rows. A file that no reader knows, or that is broken, is told of with the reason."""

import glob
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from crelle.bench.report import quality_readers as quality
from crelle.bench.report import speed_readers as speed
from crelle.bench.report.fields import Fields
from crelle.bench.report.rows import LeftOut, Row, Source
from crelle.bench.report.sources import source
from crelle.errors import FormatError
from crelle.formats.storage.io import read_json, shown

Reader = Callable[[Fields, Source], Iterator[Row | LeftOut]]

# Keys of the file (before /) and of its first row by which a kind is known; the first line that fits counts.
_KINDS: tuple[tuple[str, Reader], ...] = (
    ("peers/", quality.read_peers),
    ("layer_seconds extrapolated/", quality.read_bench_quantize),
    ("vllm milliseconds_a_step tokens_per_second/", speed.read_vllm),
    ("fp32/scheme test test_ratio", quality.read_quality),
    ("/scheme bits_per_weight tasks", quality.read_zero_shot),
    ("/scheme bits_per_weight megabytes perplexity", quality.read_demo),
    ("/text kv ratio", quality.read_texts),
    ("/kv bits_per_value ratio", quality.read_cache),
    ("model/name scheme ratio", quality.read_ablation),
    ("/scheme bits_per_weight seconds peak_gigabytes", quality.read_quantizing),
    ("/scheme shape rows tflops", speed.read_gemm),
    ("/scheme shape batch bytes baseline_microseconds", speed.read_gemv),
    ("/milliseconds_per_token weight_bytes", speed.read_decode),
    ("/who decode_tokens_per_second", speed.read_decode_cpu),
    ("/model milliseconds_per_step tokens_per_second", speed.read_serve),
    ("/model requests_per_second tokens_per_second", speed.read_serve),
    ("/attention kv torch_microseconds", speed.read_attention),
    ("/cache us cudnn_us", speed.read_attention),
)


def find(given: Iterable[str]) -> list[Path]:
    """Return result files by name, directory or pattern, each once, sorted; one that does not exist is an error."""
    found: dict[Path, Path] = {}
    for text in given:
        path = Path(text)
        if path.is_dir():
            files = sorted(path.glob("*.json"))
        elif path.exists():
            files = [path]
        else:
            files = [Path(p) for p in sorted(glob.glob(text)) if p.endswith(".json")]
        if not files:
            why = "has no .json file" if path.is_dir() else "does not exist"
            raise FormatError(f"{text} {why}; give result files that `crelle bench … --out NAME` wrote, or a directory")
        found |= {file.resolve(): file for file in files}
    return sorted(found.values(), key=lambda file: (file.name, str(file)))


def read(files: Iterable[Path]) -> tuple[list[Row], list[LeftOut]]:
    """Return the rows of all files, and the files that are left out."""
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for file in files:
        try:
            for found in _read_one(file):
                if isinstance(found, LeftOut):
                    left_out.append(found)
                else:
                    rows.append(found)
        except FormatError as e:
            left_out.append(LeftOut(file.name, str(e).replace(str(file), file.name)))
    return rows, left_out


def _read_one(file: Path) -> list[Row | LeftOut]:
    content = Fields(read_json(file), file.name)
    for keys, reader in _KINDS:
        if _fits(content, keys):
            rows = list(reader(content, source(content, file.name)))
            if not rows:
                raise FormatError(f"{file.name} has no row that the report shows")
            return rows
    if content.values.get("rows") == [] and "refused" in content:
        reasons = content.inner("refused").values.values()
        raise FormatError(f"{file.name} has no rows: all was refused ({shown(next(iter(reasons), ''), 300)})")
    names = ", ".join(list(content.values)[:8]) or "none"
    raise FormatError(f"{file.name} is of a kind that the report does not show (its keys: {names})")


def _fits(content: Fields, keys: str) -> bool:
    outer, _, inner = keys.partition("/")
    return content.has(*outer.split()) and content.first("rows").has(*inner.split())
