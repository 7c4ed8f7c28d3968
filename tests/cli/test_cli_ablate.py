"""crelle ablate atom: a row for each part, a file with a plot; and atom from the command line, end to end."""

import json
from pathlib import Path

from in_process import run, succeed

TEXT = "Once upon a time there was a fox who ran over the hill and came back home again. " * 40
SMALL = ("--rows", "4", "--length", "32", "--threads", "1")


def test_a_row_for_each_part(tiny_model: Path, tmp_path: Path) -> None:
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
    refused = run("ablate", "atom", tiny_model, "--w", "5", *measured)
    assert refused.code == 2
    assert "weights of 3, 4 or 8 bits" in refused.err


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
