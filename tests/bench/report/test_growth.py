"""What a report costs grows with its rows, not with their square: counted in bytecodes, not in seconds."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from crelle.bench.report.contents import sections
from crelle.bench.report.readers import read
from crelle.bench.report.styles import styles

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def bytecodes(run: Callable[[], object]) -> int:
    count = 0

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return each

    def call(frame: FrameType, *_: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def named_apart(tmp_path: Path, name: str, count: int) -> Path:
    """Write a file of `count` rows, no two of which are called the same."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [found["rows"][i % len(found["rows"])] for i in range(count)]
    rows = [{k: f"{v}{i}" if isinstance(v, str) else v for k, v in row.items()} for i, row in enumerate(rows)]
    (tmp_path / "r.json").write_text(json.dumps({**found, "rows": rows}))
    return tmp_path / "r.json"


def test_reading_grows_with_the_rows(tmp_path: Path) -> None:
    def work(count: int) -> int:
        file = named_apart(tmp_path, "cpu-serve-vllm", count)
        assert len(read([file])[0]) == count
        return bytecodes(lambda: read([file]))

    work(20)
    assert work(400) < 6 * work(100)


def test_styles_grow_with_the_series(tmp_path: Path) -> None:
    def work(count: int) -> int:
        rows, _ = read([named_apart(tmp_path, "h200-attention", count)])
        figures = [figure for part in sections(rows) for figure in part.figures]
        assert max(len(figure.series) for figure in figures) >= count // 2
        return bytecodes(lambda: styles(figures))

    assert work(1200) < 9 * work(200)
