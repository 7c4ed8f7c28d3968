"""crelle ablate atom: a row for each part, a file with a plot; and atom from the command line, end to end."""

import json
from pathlib import Path

from conftest import write_tiny_model
from in_process import run, succeed

TEXT = "Once upon a time there was a fox who ran over the hill and came back home again. " * 40
SMALL = ("--rows", "4", "--length", "32", "--threads", "1")


def test_a_row_for_each_part(tmp_path: Path) -> None:
    tiny_model = write_tiny_model(tmp_path / "m", num_hidden_layers=1)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    measured = ("--text", text, "--calib", text, "--context", "32", "--tokens", "64", *SMALL)
    sizes = ("--group", "16", "--outliers", "8", "--train", "1")
    done = succeed("ablate", "atom", tiny_model, *measured, *sizes, "--out", tmp_path / "a.json", "--json").json
    names = [row["name"] for row in done["rows"]]
    assert names[:3] == ["full precision", "RTN", "+ outliers in fp16"]
    assert names[-2:] == ["+ KV cache", "+ training"]
    assert done["rows"][0]["ratio"] == 1
    assert done["rows"][-1]["kv"] == "kv4"
    assert [row["name"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == names
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "a.partial.json").exists()
    _resumes_from_the_rows_of_an_unfinished_run(tiny_model, tmp_path, measured, sizes)
    refused = run("ablate", "atom", tiny_model, "--w", "5", *measured)
    assert refused.code == 2
    assert "w must be 3, 4 or 8" in refused.err


def _resumes_from_the_rows_of_an_unfinished_run(
    model: Path, folder: Path, measured: tuple[object, ...], sizes: tuple[object, ...]
) -> None:
    """Rows that were done are taken as they are, the last one is run; other settings are refused."""
    whole, target = json.loads((folder / "a.json").read_text()), folder / "b.json"
    rows = [{**row, "seconds": 12345.0} for row in whole["rows"][:-1]]
    (folder / "b.partial.json").write_text(json.dumps({**whole, "rows": rows}))
    command = ("ablate", "atom", model, *measured, "--out", target, "--resume")
    again = succeed(*command, *sizes, "--json").json
    assert again["resumed_rows"] == len(rows)
    assert again["rows"][:-1] == rows
    assert again["rows"][-1]["perplexity"] == whole["rows"][-1]["perplexity"]
    assert not (folder / "b.partial.json").exists()
    (folder / "b.partial.json").write_text(json.dumps({**whole, "context": 64}))
    refused = run(*command, *sizes)
    assert (refused.code, "another context" in refused.err) == (2, True)
    assert "--resume needs --out" in run("ablate", "atom", model, *measured, *sizes, "--resume").err


def test_atom_from_quantize_to_eval(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    scheme, own = "atom:w=4,a=4,kv=4,group=16,outliers=8", ("--own", "2")
    made = succeed(
        "quantize", tiny_model, tmp_path / "q", "--scheme", scheme, "--calib", text, *SMALL, *own, "--json"
    ).json
    assert made["scheme"] == scheme
    shown = succeed("inspect", tmp_path / "q", "--json").json
    assert any(str(layer["activation"]).startswith("int4h/16+8") for layer in shown["layers"])
    assert "int4h/16+8" in succeed("inspect", tmp_path / "q").out
    explained = succeed("explain", tmp_path / "q", "--device", "cpu").out
    assert "cpu-integer" in explained or "integer-reference" in explained
    found = succeed("eval", tmp_path / "q", "--text", text, "--context", "32", "--tokens", "64", "--json").json
    plain = succeed("eval", tiny_model, "--text", text, "--context", "32", "--tokens", "64", "--json").json
    assert found["perplexity"] < 1.5 * plain["perplexity"]
