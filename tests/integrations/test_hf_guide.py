"""docs/guide/transformers.md: its examples run, one after the other."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, write_tiny_model

GUIDE = ROOT / "docs" / "guide" / "transformers.md"


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    write_tiny_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2, **sizes)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 6
    for example in examples:
        exec(compile(example, str(GUIDE), "exec"), names)
    assert "bits per weight in 14 matrices" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"q4", "nested", "saved", "gptq"}
