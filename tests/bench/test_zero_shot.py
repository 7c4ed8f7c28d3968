"""bench/quality/zero_shot.py: rows are kept as they are done and not run again, and become tables and a plot."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BITS = {"fp16": 16.0, "rtn3": 3.3, "rtn2": 2.3}


class Commands:
    """Stands for the command line: what the script asks of it, and figures as it prints them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.broken = ""

    def __call__(self, command: str, model: Path, *args: Any) -> dict[str, Any]:
        name = Path(args[0] if command == "quantize" else model).name
        kind = command if command != "eval" else "tasks" if "--tasks" in args else "text"
        self.seen.append(f"{kind} {name}")
        if name == self.broken:
            raise RuntimeError(f"{name} fails")
        if kind == "quantize":
            Path(args[0]).mkdir()
            return {"seconds": 1.5}
        if kind == "inspect":
            return {"scheme": name, "bits_per_weight": BITS[name]}
        if kind == "text":
            found: dict[str, Any] = {"perplexity": 20.0}
            if "--against" in args:
                found["against"] = {"kl_mean": 0.25, "kl_p99": 2.5, "top1_agreement": 0.75}
            return found
        (folder := Path(args[args.index("--results") + 1])).mkdir(exist_ok=True)
        (folder / name).touch()
        figures: dict[str, Any] = {"accuracy": 0.5, "stderr": 0.03, "accuracy_norm": None, "items": 8}
        if "--against" in args:
            assert (folder / "fp16").exists()  # the baseline's items are taken from its own run
            figures["against"] = {"paired": {"difference": -0.125, "stderr": 0.04, "p_value": 0.5}}
        both = {"piqa": {**figures, "accuracy_norm": 0.625, "stderr_norm": 0.02}, "boolq": figures}
        return {"tasks": both}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench" / "quality"))
    return import_module("zero_shot")


def test_rows_are_kept_and_shown(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, out = Commands(), tmp_path / "out.json"
    monkeypatch.setattr(script, "crelle", commands)
    words = ["zero_shot.py", str(out), str(tmp_path), "--model", "m.gguf", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [*words, "--only", "rtn3,rtn2"])
    commands.broken = "rtn2"
    script.main()
    assert [r["name"] for r in json.loads(out.read_text())["rows"]] == [
        "fp16",
        "rtn3",
    ]  # one failed, the other is there
    assert "rtn2 fails" in capsys.readouterr().out
    commands.broken, commands.seen = "", []
    script.main()
    assert commands.seen == ["quantize rtn2", "tasks rtn2", "text rtn2", "inspect rtn2"]
    shown = capsys.readouterr().out
    assert "| rtn3 | 3.30 | 50.0 ± 3.0 | 50.0 ± 3.0 | 50.0 ± 2.1 | -12.5 ± 2.8 | 0.25 | 2.5 | 75.0% | 20.00 |" in shown
    assert "| rtn2 | 62.5 ± 2.0 | -12.5 ± 4.0 (0.5) | -12.5 ± 4.0 (0.5) |" in shown
    assert "| fp16 | 16.00 | 50.0 ± 3.0 | 50.0 ± 3.0 | 50.0 ± 2.1 |  |  |  |  | 20.00 |" in shown
    assert out.with_suffix(".png").stat().st_size > 10_000
    out.with_suffix(".png").unlink()
    commands.seen = []
    monkeypatch.setattr(sys, "argv", ["zero_shot.py", "--table", str(out)])
    script.main()
    assert capsys.readouterr().out.endswith(shown.partition("\n")[2])
    assert commands.seen == []


def test_an_unknown_recipe_ends_the_program(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["zero_shot.py", str(tmp_path / "o"), str(tmp_path), "--only", "rtn9"])
    with pytest.raises(SystemExit, match="there is no case rtn9; there are fp16, rtn4"):
        script.main()
