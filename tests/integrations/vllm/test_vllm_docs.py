"""The examples of docs/guide/vllm.md and the vLLM commands of plan.md run, or are at least understood by vLLM."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_process import environment

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guide"

pytestmark = pytest.mark.vllm


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (GUIDE / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_examples_run(data: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    commands = [c for block in blocks("vllm.md", "bash") for c in block.splitlines() if c.startswith("crelle")]
    assert commands
    for command in commands:
        words = [{"SRC": str(data / "stories15M"), "DIR": str(made)}.get(w, w) for w in shlex.split(command)[1:]]
        crelle = [sys.executable, "-c", "from crelle.cli.main import main; main()", *words]
        subprocess.run(crelle, check=True, env=environment(), timeout=200)
    (script,) = blocks("vllm.md", "python")
    (tmp_path / "example.py").write_text(script.replace('"DIR"', json.dumps(str(made))))
    command = [sys.executable, str(tmp_path / "example.py")]
    small = environment(VLLM_CPU_KVCACHE_SPACE="1")
    done = subprocess.run(command, env=small, capture_output=True, text=True, timeout=500)
    assert "there was a little girl" in done.stdout, done.stderr[-4000:]


def test_vllm_understands_the_commands() -> None:
    written = [line for page in ("vllm.md", "plan.md") for block in blocks(page, "bash") for line in block.splitlines()]
    inline = re.findall(r"`(vllm serve [^`]+)`", (GUIDE / "vllm.md").read_text())
    commands = [c[c.index("vllm serve") :] for c in (*written, *inline) if "vllm serve" in c]
    assert len(commands) >= 7
    code = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print("understood")
"""
    words = [shlex.split(c)[2:] for c in commands]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.count("understood") == len(commands), done.stderr[-3000:]
