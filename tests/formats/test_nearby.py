"""A path that is no model: the sentence says what was probably meant."""

from pathlib import Path

import pytest

from crelle.errors import FormatError
from crelle.formats.storage.open import open_weights


def refusal(path: Path | str) -> str:
    with pytest.raises(FormatError) as e:
        open_weights(path)
    return str(e.value)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("smollm2-3bit", "llama-4bit"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "config.json").write_text("{}")
    (tmp_path / "out" / "notes").mkdir()
    (tmp_path / "out" / "gemma.gguf").write_bytes(b"GGUF")
    return tmp_path / "out"


def test_a_name_that_is_nearly_right(models: Path) -> None:
    assert refusal(models / "smolm2-3bits").endswith(f"does not exist; did you mean {models / 'smollm2-3bit'}?")


def test_a_name_unlike_any(models: Path) -> None:
    said = refusal(models / "zzz")
    assert all(str(models / m) in said for m in ("gemma.gguf", "llama-4bit", "smollm2-3bit"))
    assert "notes" not in said


def test_a_directory_of_models(models: Path) -> None:
    assert f"it contains these models: {models / 'gemma.gguf'}, {models / 'llama-4bit'}" in refusal(models)


def test_a_run_that_was_not_finished(models: Path) -> None:
    (models / "new.partial").mkdir()
    assert "--resume" in refusal(models / "new")


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B" in refusal("meta-llama/Llama-3.2-1B")
