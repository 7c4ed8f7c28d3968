"""Efforts: what a word means on a machine, and the quality that was measured for it."""

import json
from math import floor
from pathlib import Path

import pytest

from crelle import CalibrationData, quantize
from crelle.errors import SchemeError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.quantize_job.effort import SCHEME, WORDS, Effort, Machine, resolve
from crelle.quantize_job.expected_quality import MEASURED, expected
from crelle.quantize_job.run import effort_for
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.auto import Auto

ROOT = Path(__file__).parents[2]
GPU, SMALL_CPU, SERVER = Machine("cuda"), Machine("cpu", 2, "dotprod"), Machine("cpu", 16, "amx")
SMOLLM2, ONE_BILLION = 106_168_320, 1_000_000_000
TEXT = CalibrationData(text="It was a small text to calibrate on, and to train on as well. " * 40, length=16)


@pytest.mark.parametrize(
    ("bits", "best"),
    [
        (2.35, Effort("best", "auto:bits=2.35,tune=full,steps=256,end=3000,own=4096", 128, 384)),
        (3.35, Effort("best", "auto:bits=3.35,tune=full,steps=256,end=5000,own=4096", 384, 192)),
        (4.35, Effort("best", "auto:bits=4.35,tune=full,steps=256,end=1500,own=2048", 192, 192)),
    ],
)
def test_a_gpu_takes_the_recipes_of_the_published_figures(bits: float, best: Effort) -> None:
    scheme = f"auto:bits={bits}"
    assert resolve("fast", scheme, GPU, SMOLLM2) == Effort("fast", f"{scheme},steps=16", 32, 0)
    assert resolve("balanced", scheme, GPU, SMOLLM2) == Effort("balanced", f"{scheme},steps=256", 192, 192)
    assert resolve("best", scheme, GPU, SMOLLM2) == best
    assert parse(resolve("best", scheme, GPU, 7 * ONE_BILLION).scheme).end == -1  # type: ignore[attr-defined]  # by size
    for word in WORDS:
        found = expected(resolve(word, scheme, GPU, SMOLLM2))
        assert found is not None
        assert 1 < found.least < found.most


def test_where_quality_is_preferred_scales_train_end_to_end() -> None:
    scheme, scales = "auto:bits=2.35,prefer=quality", "tune=full,steps=0,{}train=scales,prefer=quality"
    found = resolve("balanced", scheme, GPU, SMOLLM2)
    assert found == Effort("balanced", "auto:bits=2.35," + scales.format("end=600,own=1024,"), 192, 192)
    quality = expected(found)
    assert quality is not None
    assert quality.least == 1.22
    best = resolve("best", scheme, GPU, SMOLLM2).scheme
    assert best == "auto:bits=2.35," + scales.format("end=3000,own=4096,")
    assert resolve("best", scheme, GPU, 7 * ONE_BILLION).scheme == "auto:bits=2.35," + scales.format("")
    for word, size in (("fast", SMOLLM2), ("balanced", 7 * ONE_BILLION)):
        assert resolve(word, scheme, GPU, size).scheme == "auto:bits=2.35,tune=none,prefer=quality"
    assert resolve("balanced", f"{scheme},train=all,end=9", GPU, SMOLLM2).scheme == (
        "auto:bits=2.35,tune=full,steps=0,end=9,own=1024,prefer=quality"
    )


def test_a_cpu_does_what_it_has_time_for() -> None:
    assert resolve("fast", SCHEME, SMALL_CPU, SMOLLM2) == Effort("fast", "auto:bits=4.35,search=false,steps=0", 8, 0)
    assert resolve("balanced", SCHEME, SMALL_CPU, SMOLLM2) == Effort("balanced", "auto:bits=4.35,steps=0", 32, 0)
    assert resolve("best", SCHEME, SMALL_CPU, SMOLLM2) == Effort("best", "auto:bits=4.35,steps=32", 64, 0)
    for word in WORDS:  # a faster machine does no less, a larger model gets no more
        here, there, larger = (
            resolve(word, SCHEME, machine, size)
            for machine, size in ((SMALL_CPU, SMOLLM2), (SERVER, SMOLLM2), (SMALL_CPU, ONE_BILLION))
        )
        assert larger.rows <= here.rows <= there.rows
        assert "tune=full" not in there.scheme
        configs = [parse(e.scheme) for e in (larger, here, there)]
        assert [c.steps for c in configs if isinstance(c, Auto)] == sorted(c.steps for c in configs)  # type: ignore[attr-defined]


def test_without_a_text_half_of_the_data_is_the_models_own() -> None:
    assert resolve("balanced", SCHEME, SMALL_CPU, SMOLLM2, text=False) == Effort(
        "balanced", "auto:bits=4.35,steps=0", 16, 16
    )
    found = resolve("balanced", SCHEME, GPU, SMOLLM2, text=False)
    assert (found.rows, found.own) == (192, 192)
    found = resolve("balanced", SCHEME, SMALL_CPU, SMOLLM2, text=False, rows=10, own=3)
    assert (found.rows, found.own) == (5, 8)


def test_what_is_asked_for_stays() -> None:
    found = resolve("best", "auto:bits=3.35,steps=7", GPU, SMOLLM2, rows=5, own=6)
    assert found == Effort("best", "auto:bits=3.35,tune=full,steps=7,end=5000,own=4096", 5, 6)
    found = resolve("best", "auto:bits=3.35,tune=short,search=false", GPU, SMOLLM2)
    assert found.scheme == "auto:bits=3.35,search=false,steps=256"
    assert resolve("best", "auto:bits=3.35,end=9", GPU, SMOLLM2).scheme.endswith("end=9,own=4096")
    assert resolve("fast", "gptq:bits=4,group=64", GPU, SMOLLM2) == Effort("fast", "gptq:bits=4,group=64", 32, 0)
    assert resolve("best", "rtn:bits=4,group=64", GPU, SMOLLM2) == Effort("best", "rtn:bits=4,group=64", 0, 0)
    assert resolve("fast", "rtn:bits=4,group=64", GPU, SMOLLM2, calibrated=True).rows == 32  # for an override
    with pytest.raises(SchemeError, match="unknown effort 'most'; choose fast, balanced or best"):
        resolve("most", SCHEME, GPU, SMOLLM2)


@pytest.mark.parametrize("scheme", ["gptq:bits=2,group=64", "hbcq:bits=2,group=128"])
def test_two_bits_are_guided_by_the_loss_where_that_is_not_too_slow(scheme: str) -> None:
    for word in ("balanced", "best"):
        assert resolve(word, scheme, GPU, SMOLLM2).scheme == f"{scheme},guidance=0.5"
        assert resolve(word, f"{scheme},guidance=0", GPU, SMOLLM2).scheme == scheme
        three = scheme.replace("bits=2", "bits=3")
        assert parse(resolve(word, three, GPU, SMOLLM2).scheme) == parse(three)
    assert resolve("fast", scheme, GPU, SMOLLM2).scheme == scheme


def test_expected_qualities_are_those_of_the_files() -> None:
    for m in MEASURED:
        ratios = []
        for row in json.loads((ROOT / m.file).read_text())["rows"]:
            same = str(parse(row["scheme"])) == m.scheme and (row["rows"], row["own"]) == (m.rows, m.own)
            if same and "development" not in str(row.get("run")):
                ratios += [row[f"{text}_ratio"] for text in ("test", "unseen", "python")]
        assert ratios, m.scheme
        assert m.least == pytest.approx(floor(100 * min(ratios)) / 100), m.scheme
        assert m.most == pytest.approx(-floor(-100 * max(ratios)) / 100), m.scheme


def test_the_fast_recipe_of_every_cpu_is_measured() -> None:
    for isa, rows in (("generic", 4), ("dotprod", 4), ("avx2", 8), ("avx512-vnni", 16), ("amx", 16)):
        effort = resolve("fast", SCHEME, Machine("cpu", 2, isa), SMOLLM2, text=False)
        found = expected(effort)
        assert (effort.rows, effort.own) == (rows, rows)
        assert found is not None
        assert (found.least, found.most) == ((1.06, 1.12) if rows == 16 else (1.08, 1.14))


def test_between_measured_sizes_quality_is_interpolated_and_elsewhere_unknown() -> None:
    ends = [expected(resolve("balanced", f"auto:bits={b}", GPU, SMOLLM2)) for b in (2.35, 2.8, 3.35)]
    assert all(e is not None for e in ends)
    low, between, high = (e for e in ends if e is not None)
    assert high.least < between.least < low.least
    assert between.bits == (2.35, 3.35)
    assert expected(resolve("balanced", "auto:bits=1.5", GPU, SMOLLM2)) is None
    assert expected(resolve("balanced", "auto:bits=3.35,steps=3", GPU, SMOLLM2)) is None
    assert expected(resolve("balanced", "auto:bits=3.35", GPU, SMOLLM2, rows=8, own=0)) is None
    assert expected(Effort("balanced", "rtn:bits=4,group=64", 0, 0)) is None


def test_an_effort_from_python_is_kept_and_resumed(small_model: Path, tmp_path: Path) -> None:
    options = {"text": CalibrationData(text=TEXT.text, rows=4, length=16), "effort": "fast", "device": "cpu"}
    report = quantize(small_model, tmp_path / "whole", "auto:bits=4.35,steps=1", **options)  # type: ignore[arg-type]
    assert (report.effort, report.calibration_rows, report.own_sequences) == ("fast", 4, 0)
    assert Checkpoint(tmp_path / "whole").scheme == report.scheme

    def stop(done: int, total: int, note: str) -> None:
        if note.endswith("layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(small_model, tmp_path / "q", "auto:bits=4.35,steps=1", progress=stop, **options)  # type: ignore[arg-type]
    quantize(small_model, tmp_path / "q", "auto:bits=4.35,steps=1", resume=True, **options)  # type: ignore[arg-type]
    files = {f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir() if f.is_file()}
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "q").iterdir() if f.is_file()}


def test_without_scheme_and_text_it_is_balanced(small_model: Path) -> None:
    found = effort_for(small_model, device="cpu")
    assert found.name == "balanced"
    assert found.scheme.startswith(SCHEME)
    assert found.rows == found.own > 0
