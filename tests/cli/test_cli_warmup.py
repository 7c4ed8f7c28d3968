"""crelle warmup, and what is said when a kernel is compiled."""

from pathlib import Path
from typing import Any

import pytest
from in_process import run, succeed

from crelle.cli.common.console import report_compilation
from crelle.cli.common.option_groups import ModelOptions
from crelle.engine import compile_ahead
from crelle.engine.engine import Engine
from crelle.kernels.cuda import jit


def test_on_a_cpu_there_is_nothing_to_compile(tiny_model: Path) -> None:
    assert "nothing to compile" in succeed("warmup", tiny_model, "--device", "cpu").out
    seen = succeed("warmup", tiny_model, "--device", "cpu", "--json").json
    assert (seen["kernels"], seen["device"]) == (0, "cpu")


def test_batch_and_prompt_reach_the_compiler(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(engine: Any, sequences: Any, prompts: Any, *, progress: Any) -> tuple[int, float]:
        asked.append((list(sequences), list(prompts)))
        progress(1, 1)
        return 7, 1.5

    monkeypatch.setattr(compile_ahead, "compile_kernels", fake)
    assert "7 kernels in 1.5 s" in succeed("warmup", tiny_model, "--batch", 3, "--prompt", 40, "--device", "cpu").out
    assert asked == [([1, 2, 3], compile_ahead.prompt_sizes(40))]


def test_generate_compiles_on_all_cores_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the compiler: what is asked of it the first time, and that the second time nothing is."""
    asked: list[Any] = []

    def fake(engine: Any, sequences: Any, prompts: Any, *, progress: Any) -> tuple[int, float]:
        asked.append((list(sequences), list(prompts)))
        progress(1, 1)
        return 1, 0.5

    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "compile_kernels", fake)
    monkeypatch.setattr(jit, "toolchain", lambda: "this compiler")
    generate = ("generate", tiny_model, "--prompt", "Hello", "--max-tokens", "2", "--device", "cpu")
    succeed(*generate)
    assert asked == []  # on a CPU
    monkeypatch.setattr(compile_ahead, "on_gpu", lambda model: True)
    jit.kernel_directory().mkdir()
    assert "compiling CUDA kernels (first run only)" in succeed(*generate).err
    assert "compiling" not in succeed(*generate).err
    assert [sequences for sequences, _ in asked] == [[1]]
    monkeypatch.setattr(jit, "toolchain", lambda: "another one")
    assert "compiling CUDA kernels (first run only)" in succeed(*generate).err
    assert asked[0] == asked[1]
    assert len(list(jit.kernel_directory().glob("compiled-*"))) == 2


def test_a_server_compiles_for_every_batch_before_it_serves(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "compile_kernels", lambda e, s, p, **_: asked.append((e, list(s), list(p))))
    monkeypatch.setattr(compile_ahead, "on_gpu", lambda model: True)
    monkeypatch.setattr(jit, "toolchain", lambda: "this compiler")
    jit.kernel_directory().mkdir()
    options = ModelOptions(bits=None, device="cpu", threads=None, kernel=None)
    llm = options.load(tiny_model)
    engine = Engine(llm, pages=4, max_batch=3)
    for _ in range(2):
        options.compile(llm, tiny_model, [2, 3], engine)
    assert asked == [(engine, [1, 2, 3], [2, 3])]
    options.compile(llm, tiny_model, [2, 3])  # one sequence: another mark
    assert asked[1][1:] == ([1], [2, 3])


@pytest.mark.parametrize("options", [("--batch", "0"), ("--prompt", "1")])
def test_mistakes_get_a_sentence(tiny_model: Path, options: tuple[str, str]) -> None:
    result = run("warmup", tiny_model, *options)
    assert result.code == 2
    assert options[0] in result.err


def test_the_first_compilation_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path))
    built = jit.CompiledKernel("x.cu", "f<1>", "sm_90a", "f", b"", 0.0, False)
    monkeypatch.setattr(jit, "_nvrtc", lambda *_: built)
    monkeypatch.setattr(jit, "_key", lambda file, expression, arch: f"{expression}-{tmp_path.name}")
    monkeypatch.setattr(jit, "_publish", lambda *_: None)
    report_compilation(Path("out/model"))
    for expression in ("f<1>", "f<2>"):
        jit.compile("x.cu", expression, "sm_90a")
    assert capsys.readouterr().err.count("crelle warmup out/model") == 1
    assert jit.on_compile is None


@pytest.mark.gpu
def test_plain_commands_run_on_a_gpu(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache and no options: what a new user types."""
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "cache"))
    made, text = tmp_path / "made", tmp_path / "text.txt"
    text.write_text("Once upon a time there was a bit-plane. " * 40)
    succeed("quantize", tiny_model, made, "--scheme", "rtn:bits=4,group=32")
    generate = ("generate", made, "--prompt", "Hello", "--max-tokens", "8")
    first, second = succeed(*generate), succeed(*generate)
    assert "compiling CUDA kernels (first run only)" in first.err
    assert "compiling" not in second.err
    assert first.out == second.out
    assert succeed("eval", made, "--text", text, "--json").json["perplexity"] > 1
    assert "cuda" in succeed("explain", made).out
    assert succeed("warmup", made, "--batch", "2", "--prompt", "16", "--json").json["kernels"] > 0
