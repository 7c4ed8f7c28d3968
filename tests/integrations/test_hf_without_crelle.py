"""Processes of their own: transformers without crelle, and crelle imported before and after it."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import quantized_copy
from hf_models import write_model
from transformers import AutoModelForCausalLM

ALONE = """
import sys
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    for options in ({}, {"use_safetensors": True}, {"use_safetensors": False}):
        try:
            AutoModelForCausalLM.from_pretrained(path, **options)
        except Exception as e:
            print(e)
        else:
            print("loaded")
"""
AFTER = """
import importlib, sys
from transformers import AutoModelForCausalLM
import crelle
importlib.reload(crelle)  # registers twice
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("without")
    return quantized_copy(write_model("llama", at / "m"), at / "q", "rtn:bits=4,group=32")


def test_transformers_alone_fails_with_a_sentence(made: Path, tmp_path: Path) -> None:
    """On what `crelle quantize` wrote and on what save_pretrained wrote."""
    AutoModelForCausalLM.from_pretrained(made).save_pretrained(tmp_path / "s")
    said = run(ALONE, made, tmp_path / "s").stdout.splitlines()
    assert len(said) == 6
    assert all("this is a Crelle checkpoint: install crelle and `import crelle`" in line for line in said), said


def test_crelle_imported_after_transformers(made: Path) -> None:
    done = run(AFTER, made)
    assert (done.returncode, done.stdout.strip()) == (0, "CrelleLinear"), done.stderr


def test_import_crelle_imports_neither_torch_nor_transformers() -> None:
    done = run("import crelle, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr
