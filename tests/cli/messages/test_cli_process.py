"""What only a true process shows: start, exit codes, pipes."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import Run

from crelle import LLM, Sampling
from crelle.version import __version__


def test_version(crelle_process: Run) -> None:
    done = crelle_process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"crelle {__version__}\n", "")


def test_command_line_starts_without_torch_and_transformers() -> None:
    code = (
        "import sys, crelle.cli.main; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_generate_reads_a_pipe_and_writes_one_json_object(crelle_process: Run, tiny_model: Path) -> None:
    done = crelle_process("generate", tiny_model, "--prompt", "-", "--max-tokens", 9, "--json", input="Hé")
    assert done.returncode == 0
    seen = json.loads(done.stdout)
    assert seen["text"] == LLM.load(tiny_model).generate("Hé", Sampling(max_tokens=9)).text


def test_mistake_is_one_line_on_standard_error_and_code_2(crelle_process: Run, tiny_model: Path) -> None:
    done = crelle_process("generate", tiny_model, "--prompt", "x" * 200)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("crelle: the prompt has 201 tokens")


def test_reader_that_goes_away_is_no_error_of_ours(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "crelle.cli.main", "generate", str(tiny_model), "--prompt", "x" * 20]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert said == ""
