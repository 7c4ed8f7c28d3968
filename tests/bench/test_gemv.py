"""The GEMV bench: it refuses to time a wrong kernel, and its figures fit each other."""

import json
import sys
from pathlib import Path

import pytest
import torch

from crelle.bench import external
from crelle.bench.kernels import gemv
from crelle.errors import SchemeError, UnsupportedError
from crelle.kernels import cpu
from crelle.kernels.cpu import check
from crelle.quantizers.scheme import parse

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=f"the C++ core {cpu.available()}")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "_ROUNDS", 3)
    monkeypatch.setattr(gemv, "_SLICE", 0.002)
    monkeypatch.setattr(gemv, "COLD_BYTES", 1_000_000)


@pytest.mark.parametrize("working_set", ["hot", "cold"])
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_figures_fit_each_other(working_set: str, precision: str) -> None:
    r = gemv.measure(256, 192, "bcq:bits=2,group=64", threads=1, working_set=working_set, precision=precision)
    assert 0 < r.max_rel_err <= gemv.TOLERANCE[precision]
    assert r.gb_per_s == pytest.approx(r.bytes / r.microseconds / 1e3)
    assert r.share_of_roofline == pytest.approx(r.gb_per_s / r.roofline_gb_per_s)
    assert r.speedup == pytest.approx(r.baseline_microseconds / r.microseconds)
    assert r.bytes >= 256 * 192 * 2 / 8
    assert r.isa in cpu.core().isas()


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = parse("rtn:bits=4,group=32").fit(torch.randn(64, 64))
    wrong = parse("rtn:bits=4,group=32").fit(torch.randn(64, 64))
    monkeypatch.setattr(check, "matmul_fp64", lambda x, _: x.double() @ wrong.dequantize(torch.float64).T)
    with pytest.raises(UnsupportedError, match="wrong here"):
        gemv.check(torch.randn(1, 64), w, "exact")


def test_an_output_that_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = parse("rtn:bits=4,group=32").fit(torch.randn(64, 64))

    class Lazy:
        def matmul(self, *_: object) -> None: ...

    monkeypatch.setattr(gemv.cpu, "core", Lazy)
    monkeypatch.setattr(check.ops, "prepare", lambda *_: type("P", (), {"data": type("D", (), {"data": None})}))
    with pytest.raises(UnsupportedError, match="nan"):
        gemv.check(torch.randn(1, 64), w, "exact")


@pytest.mark.parametrize("wrong", [{"working_set": "lukewarm"}, {"precision": "vague"}])
def test_unknown_settings_are_sentences(wrong: dict[str, str]) -> None:
    with pytest.raises(SchemeError, match=next(iter(wrong.values()))):
        gemv.measure(8, 8, "rtn:bits=4,group=8", threads=1, **wrong)  # type: ignore[arg-type]


def peer_script(path: Path, body: str) -> str:
    path.write_text(f"import json, os\n{body}\n")
    return f"{sys.executable} {path}"


def test_a_peer_gets_the_problem_and_keeps_its_own_wait_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    body = (
        "print('some chatter')\n"
        "known = [os.environ['CRELLE_' + k] for k in ('N', 'K', 'BATCH', 'THREADS', 'SET')]\n"
        "known.append(os.environ.get('OMP_WAIT_POLICY', 'free'))\n"
        "print(json.dumps({'who': ' '.join(known), 'microseconds': 2}))"
    )
    command = peer_script(tmp_path / "peer.py", body)
    assert external.gemv_peer(command, 8, 16, 1, 2, "hot") == {"8 16 1 2 hot free": 2.0}


@pytest.mark.parametrize(
    ("body", "words"), [("raise SystemExit('broken')", "broken"), ("print('hi')", "no line of JSON")]
)
def test_a_peer_that_fails_is_a_sentence(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        external.gemv_peer(peer_script(tmp_path / "peer.py", body), 8, 16, 1, 2, "hot")


def test_a_missing_peer_is_a_sentence() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot run \./nowhere"):
        external.gemv_peer("./nowhere", 8, 16, 1, 2, "hot")


def test_llama_bench_takes_the_best_sample_of_each_kind(tmp_path: Path) -> None:
    rows = [{"n_gen": 0, "samples_ts": [10, 30.5]}, {"n_gen": 64, "samples_ts": [7.5, 5]}]
    program = tmp_path / "llama-bench"
    program.write_text(f"#!{sys.executable}\nprint({json.dumps(json.dumps(rows))})\n")
    program.chmod(0o755)
    assert external.llama_bench(program, Path("m.gguf"), 1, 64, 512) == (7.5, 30.5)
