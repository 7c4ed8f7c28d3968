"""An error names a parameter in Python and an option on the command line."""

import ast
import re
from pathlib import Path

import pytest
import typer.main
from in_process import run

import crelle
from crelle import LLM, CrelleError, perplexity, quantize
from crelle.cli.common.options_in_errors import options_of, with_options
from crelle.cli.main import app

SOURCE = Path(crelle.__file__).parent
LIBRARY = ("engine", "eval", "formats", "kernels", "models", "quantizers")


@pytest.mark.parametrize(
    ("sentence", "printed"),
    [
        ("lower `context`", "lower --context"),
        ("`overwrite=True` starts over", "--overwrite starts over"),
        ("use `device='cpu'` or `rows=4`", "use --device cpu or --rows 4"),
        ("run `crelle explain MODEL`; `unknown`", "run `crelle explain MODEL`; `unknown`"),
    ],
)
def test_parameters_become_options(sentence: str, printed: str) -> None:
    options = {"context": "--context", "overwrite": "--overwrite", "device": "--device", "rows": "--rows"}
    assert with_options(sentence, options) == printed


def test_options_are_those_of_the_command_that_runs() -> None:
    root = typer.main.get_command(app)
    assert options_of(root, ["quantize", "a", "b"])["overwrite"] == "--overwrite"
    assert options_of(root, ["search", "m"])["out"] == "--out"  # whatever the function calls it
    assert "overwrite" not in options_of(root, ["generate", "quantize", "--prompt", "x"])
    assert options_of(root, ["bench", "decode"])["shape"] == "--shape"


def test_same_mistake_in_python_and_on_the_command_line(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", "fp16")
    with pytest.raises(CrelleError, match=r"replace it with `overwrite=True`") as refused:
        quantize(tiny_model, tmp_path / "q", "fp16")
    assert "--" not in str(refused.value)
    assert "replace it with --overwrite" in run("quantize", tiny_model, tmp_path / "q", "--scheme", "fp16").err
    with pytest.raises(CrelleError, match="lower `context`"):
        perplexity(LLM.load(tiny_model, device="cpu"), "few words")
    shown = run("eval", tiny_model, "--context", 2048, "--json")
    assert "lower --context" in shown.json["error"]


def test_no_error_of_the_library_names_an_option_alone() -> None:
    """A whole command in backticks, or one of another program, is not meant."""
    found = []
    for file in (f for part in LIBRARY for f in (SOURCE / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                text = " ".join(
                    n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                )
                for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"`[^`]* [^`]*`", "", text)):
                    if "pip install" not in text:
                        found.append(f"{file.relative_to(SOURCE)}: {option}")
    assert found == []


def test_names_that_load_on_first_use_are_listed() -> None:
    assert {"LLM", "Sampling", "quantize", "perplexity", "CrelleConfig"} <= set(dir(crelle))


def test_llm_says_what_it_is(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=24")
    shown = repr(LLM.load(tmp_path / "q", device="cpu"))
    assert re.fullmatch(
        rf"<LLM {tmp_path}/q: rtn:bits=4,group=24, \d\.\d+ bits per weight, on cpu, context 96, cache kv16>", shown
    )
    assert "not quantized by Crelle, on cpu" in repr(LLM.load(tiny_model, device="cpu"))
