"""What each command prints, for people and as JSON, on a tiny model."""

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import safetensors.torch
from conftest import write_tiny_model
from in_process import run, succeed

from crelle import LLM, Sampling, perplexity
from crelle.cli.commands import evaluate
from crelle.cli.common import console
from crelle.cli.views.inspect_table import kinds
from crelle.version import __version__

SCHEME = "bcq:bits=3,group=24"


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "q"
    succeed("quantize", tiny_model, out, "--scheme", SCHEME)
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("All that glitters is not gold; naïve 漢字. " * 12)
    return file


# quantize, inspect -------------------------------------------------------------------------------------------------


def stored_bits_per_weight(path: Path) -> float:
    """Bytes of the layers' quantized tensors, times 8, over their weights; nothing but files is asked."""
    specs = json.loads((path / "config.json").read_text())["quantization_config"]["tensors"]
    coded = {m: s for m, s in specs.items() if s["format"] != "dense" and ".layers." in m}
    size = 0
    for shard in path.glob("*.safetensors"):
        for name, t in safetensors.torch.load_file(shard).items():
            size += t.nbytes if name.rpartition(".")[0] in coded and "norm" not in name else 0
    return 8 * size / sum(s["shape"][0] * s["shape"][1] for s in coded.values())


@pytest.mark.parametrize(
    "scheme", ["rtn:bits=4,group=24", "bcq:bits=2,group=32", "rtn:bits=3,group=row,symmetric=true"]
)
def test_bits_per_weight_are_what_the_files_hold(scheme: str, tiny_model: Path, tmp_path: Path) -> None:
    made = succeed("quantize", tiny_model, tmp_path / "q", "--scheme", scheme, "--json").json
    assert made["scheme"] == scheme
    assert made["out"] == str(tmp_path / "q")
    assert made["seconds"] > 0
    seen = succeed("inspect", tmp_path / "q", "--json").json
    assert seen["scheme"] == scheme
    assert seen["bits_per_weight"] == pytest.approx(stored_bits_per_weight(tmp_path / "q"), rel=0.01)
    assert seen["bits_per_weight"] == pytest.approx(made["bits_per_weight"])
    assert seen["bytes"] == made["bytes"] == pytest.approx(seen["bits_per_weight"] * seen["weights"] / 8)
    assert seen["file_bytes"] == sum(f.stat().st_size for f in (tmp_path / "q").iterdir())


def test_inspect_lists_every_matrix(quantized: Path) -> None:
    seen = succeed("inspect", quantized, "--json").json
    layers = {layer["name"]: layer for layer in seen["layers"]}
    assert len(layers) == 3 * 7 + 2
    up = layers["model.layers.1.mlp.up_proj"]
    assert (up["format"], up["shape"], up["bits"], up["group"]) == ("bcq", [100, 72], 3, 24)
    assert layers["lm_head"]["bits"] == layers["model.embed_tokens"]["bits"] == 8
    assert seen["weights"] == sum(x["shape"][0] * x["shape"][1] for n, x in layers.items() if ".layers." in n)


@pytest.mark.parametrize(
    ("scheme", "options", "bits"),
    [
        (SCHEME, ("--head", "none"), 32),
        (SCHEME, ("--head", "4"), 4),
        (SCHEME, (), 8),
        ("fp16", (), 32),
        ("keep", (), 32),
    ],
)
def test_the_head_has_8_bits_unless_told_otherwise(
    tiny_model: Path, tmp_path: Path, scheme: str, options: tuple[str, ...], bits: int
) -> None:
    made = succeed("quantize", tiny_model, tmp_path / "q", "--scheme", scheme, *options, "--json").json
    layers = {x["name"]: x for x in succeed("inspect", tmp_path / "q", "--json").json["layers"]}
    assert layers["lm_head"]["bits"] == layers["model.embed_tokens"]["bits"] == bits
    inside = [x for n, x in layers.items() if ".layers." in n]
    weights = sum(x["shape"][0] * x["shape"][1] for x in inside)
    assert made["bits_per_weight"] == pytest.approx(8 * sum(x["bytes"] for x in inside) / weights)


def test_inspect_shows_one_row_per_kind_of_matrix_in_80_columns(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    shown = succeed("inspect", quantized).out
    *table, summary = [line.rstrip() for line in shown.splitlines() if line.strip()]
    rows = {line.split()[0]: line.split()[1:] for line in table[table.index(max(table, key=lambda x: x.count("─"))) :]}
    layer = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert rows.keys() >= layer | {"embed_tokens", "lm_head"}
    assert len(rows) == 1 + 9  # and the line under the header
    assert rows["up_proj"][:7] == ["3", "bcq", "100", "x", "72", "3", "24"]
    assert "…" not in shown
    assert max(map(len, table)) <= 80
    assert summary.startswith(f"{SCHEME}: ")
    seen = succeed("inspect", quantized, "--json").json
    assert sum(kind["bytes"] for kind in seen["kinds"]) == sum(x["bytes"] for x in seen["layers"])


def test_inspect_shows_what_is_behind_a_rotation(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    text = tmp_path / "text"
    text.write_text("a b c d e f g h " * 200, encoding="utf-8")
    succeed("quantize", tiny_model, tmp_path / "q", "--scheme", "trellis:bits=2", "--calib", text, "--rows", "2")
    layers = {x["name"]: x for x in succeed("inspect", tmp_path / "q", "--json").json["layers"]}
    up = layers["model.layers.1.mlp.up_proj"]
    assert (up["format"], up["inner"], layers["lm_head"]["inner"]) == ("rotated", "trellis", None)
    shown = succeed("inspect", tmp_path / "q").out
    assert "rotated trellis" in shown
    assert "…" not in shown


def test_inspect_all_shows_every_matrix_with_its_whole_name(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    shown = succeed("inspect", quantized, "--all").out
    assert "…" not in shown
    for name in (x["name"] for x in succeed("inspect", quantized, "--json").json["layers"]):
        assert name in shown


def test_kinds_of_matrices_with_the_same_last_name_are_told_apart() -> None:
    layer = {
        "format": "dense",
        "inner": None,
        "shape": [8, 8],
        "bits": 16,
        "group": 8,
        "shares": {},
        "outliers": 0,
        "bytes": 128,
    }
    names = [f"h.{i}.{part}.c_proj" for i in range(2) for part in ("attn", "mlp")]
    names += [f"h.{i}.moe.experts.{j}.w1" for i in range(2) for j in range(4)]
    found = kinds([{**layer, "activation": None, "name": name} for name in names])
    assert [(kind["name"], kind["count"]) for kind in found] == [("attn.c_proj", 2), ("mlp.c_proj", 2), ("w1", 8)]


def test_inspect_of_an_unquantized_model(tiny_model: Path) -> None:
    seen = succeed("inspect", tiny_model, "--json").json
    assert (seen["scheme"], seen["bits_per_weight"]) == ("not quantized by Crelle", 32)


def test_overrides_reach_their_matrices(tiny_model: Path, tmp_path: Path) -> None:
    more = ("--override", "*.down_proj=rtn:bits=8,group=row", "--override", "model.layers.0.*=fp16")
    succeed("quantize", tiny_model, tmp_path / "q", "--scheme", SCHEME, *more)
    seen = succeed("inspect", tmp_path / "q", "--json").json
    found = {x["name"]: (x["format"], x["bits"]) for x in seen["layers"]}
    assert found["model.layers.0.mlp.down_proj"] == ("uniform", 8)  # the first pattern that matches counts
    assert found["model.layers.0.mlp.up_proj"] == ("dense", 16)
    assert found["model.layers.1.mlp.up_proj"] == ("bcq", 3)
    assert list(seen["overrides"]) == ["*.down_proj", "model.layers.0.*", "lm_head", "model.embed_tokens"]


def test_quantize_says_what_it_made_also_where_the_name_has_brackets(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "model[v2]"
    shown = succeed("quantize", tiny_model, out, "--scheme", "rtn:bits=4,group=24").out
    assert shown.startswith(f"{out}: rtn:bits=4,group=24, ")


# eval --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--no-bos"], ["--tokens", "200"]])
def test_eval_equals_the_function(quantized: Path, text: Path, more: list[str]) -> None:
    seen = succeed("eval", quantized, "--text", text, "--context", 64, "--device", "cpu", "--json", *more).json
    options = {"bos": "--no-bos" not in more, "tokens": 200 if "--tokens" in more else None}
    result = perplexity(LLM.load(quantized, device="cpu"), text.read_text(), context=64, **options)
    assert seen["perplexity"] == pytest.approx(result.perplexity, rel=1e-6)
    assert (seen["tokens"], seen["windows"], seen["context"]) == (result.tokens, result.windows, 64)


def test_eval_without_tokens_evaluates_the_beginning_of_a_long_text(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "DEFAULT_TOKENS", 200)
    (long := tmp_path / "long.txt").write_text("x" * 1000)
    args = ("eval", tiny_model, "--text", long, "--context", 65)  # BOS and 64 tokens
    seen = succeed(*args, "--json").json
    assert (seen["tokens"], seen["text_tokens"]) == (192, 1000)
    assert succeed(*args, "--tokens", "all", "--json").json["tokens"] == 960
    assert succeed(*args, "--tokens", 400, "--json").json["tokens"] == 384
    shown = succeed(*args)
    assert "over the first 192 of 1,000 tokens (--tokens all for the whole text)" in shown.out
    assert "--tokens all" not in succeed(*args, "--tokens", "all").out
    for compared in (("--against", tiny_model), ("--kl", "--kv", 8)):
        seen = succeed(*args, *compared, "--json").json
        assert (seen["tokens"], seen["text_tokens"]) == (192, 1000)


def test_eval_has_a_window_even_where_it_is_longer_than_the_default(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "DEFAULT_TOKENS", 50)
    assert succeed("eval", tiny_model, "--context", 90, "--json").json["windows"] == 1


def test_eval_for_people(quantized: Path, text: Path) -> None:
    result = succeed("eval", quantized, "--text", text, "--context", 64)
    assert result.out.startswith("perplexity ")
    assert "windows of 64 with BOS" in result.out


def test_eval_uses_the_documentation_of_python_by_default(tiny_model: Path) -> None:
    assert succeed("eval", tiny_model, "--context", 90, "--tokens", 180, "--json").json["tokens"] == 178


# generate ----------------------------------------------------------------------------------------------------------


def test_generate_equals_the_library(quantized: Path) -> None:
    options = ("--temperature", 1.1, "--top-k", 60, "--top-p", 0.9, "--min-p", 0.01, "--seed", 3)
    more = ("--repetition-penalty", 1.2, "--stop", "q", "--stop", "zz", "--max-tokens", 30)
    seen = succeed("generate", quantized, "--prompt", "Hé", *options, *more, "--json").json
    sampling = Sampling(
        max_tokens=30,
        temperature=1.1,
        top_k=60,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        seed=3,
        stop=("q", "zz"),
    )
    done = LLM.load(quantized).generate("Hé", sampling)
    assert (seen["text"], seen["tokens"], seen["finish_reason"]) == (done.text, done.tokens, done.finish_reason)
    assert seen["tokens_per_second"] > 0
    assert seen["prompt_tokens"] == done.prompt_tokens


def test_generate_shows_prompt_and_text(tiny_model: Path) -> None:
    result = succeed("generate", tiny_model, "--prompt", "Hello", "--max-tokens", 12)
    expected = LLM.load(tiny_model).generate("Hello", Sampling(max_tokens=12)).text
    assert result.out == f"Hello{expected}\n"
    assert "12 tokens, " in result.err
    assert "finish reason: length" in result.err


def test_generate_reads_the_prompt_from_standard_input(tiny_model: Path) -> None:
    args = ("generate", tiny_model, "--max-tokens", 8, "--json", "--prompt")
    a, b = succeed(*args, "-", stdin="naïve\nlines").json, succeed(*args, "naïve\nlines").json
    assert a["tokens"] == b["tokens"]
    assert a["prompt_tokens"] == 13  # BOS and every byte, the line break too


def test_generate_keeps_to_a_memory_limit(tiny_model: Path) -> None:
    args = ("generate", tiny_model, "--prompt", "Hello", "--max-tokens", 4, "--device", "cpu", "--memory")
    assert succeed(*args, "4GB").out == succeed(*args[:-1]).out
    assert "a memory limit of 1 MB leaves no room for the KV cache" in run(*args, "1MB").err
    assert "a memory size must look like 24GB" in run(*args, "some").err


# explain, doctor ---------------------------------------------------------------------------------------------------


def test_explain_gives_every_matrix_a_kernel_and_the_others_a_reason(quantized: Path) -> None:
    seen = succeed("explain", quantized, "--device", "cpu", "--json").json
    llm = LLM.load(quantized, device="cpu")
    assert seen["device"] == "cpu"
    assert {x["name"]: x["kernel"] for x in seen["layers"]} == {x.name: x.kernel for x in llm.model.linears()}
    for layer in seen["layers"]:
        assert layer["kernel"] not in layer["others"]
        assert "reference" in {layer["kernel"], *layer["others"]}
        assert all(layer["others"].values())
        assert {"format", "N", "K", "bits", "group", "device", "dtype"} <= set(layer["problem"])


def test_explain_lists_a_tied_head(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, tie_word_embeddings=True)
    layers = {x["name"]: x for x in succeed("explain", path, "--json").json["layers"]}
    assert (layers["lm_head"]["problem"]["N"], layers["lm_head"]["problem"]["K"]) == (259, 72)
    assert set(layers) == {x.name for x in LLM.load(path).model.linears()}


def test_explain_for_people_is_short_and_the_reasons_come_on_demand(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    shown = succeed("explain", quantized).out
    assert shown.startswith("generation and serving: ")  # the executor first
    assert len(shown.splitlines()) < 20
    assert "k_proj" in shown
    assert "lower priority" not in shown
    assert "--why" in shown
    whole = succeed("explain", quantized, "--why").out
    assert "not reference: supported, but has lower priority" in whole
    assert "not cuda: runs on a GPU" in whole
    assert "not torch: supported, but slower" in whole or "torch, layer by layer" in whole


def test_explain_says_without_being_asked_why_a_slow_path_runs(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crelle.kernels import cpu

    monkeypatch.setattr(cpu, "_load", lambda: "is not built here")
    shown = succeed("explain", quantized, "--device", "cpu").out
    assert re.search(r"torch, layer by layer\n    not cpu-fused: .*", shown)
    assert re.search(r"(dequantized|reference) runs .*\n    not cpu: .*is not built here", shown)
    assert "not cuda" not in shown


def test_doctor_checks_the_installation() -> None:
    seen = succeed("doctor", "--json").json
    assert seen["crelle"] == __version__
    assert {
        "python",
        "torch",
        "C++ kernels",
        "CUDA",
        "CUDA kernels",
        "transformers",
        "gguf",
        "cache",
        "aiohttp",
        "msgspec",
        "prometheus-client",
    } <= {c["what"] for c in seen["checks"]}
    assert {c["state"] for c in seen["checks"]} <= {"ok", "absent", "problem"}
    assert all(c["detail"] for c in seen["checks"])
    shown = succeed("doctor").out
    assert all(c["what"] in shown for c in seen["checks"])


def test_doctor_says_what_the_server_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "msgspec":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("crelle.cli.commands.doctor.version", version)
    states = {c["what"]: (c["state"], c["detail"]) for c in succeed("doctor", "--json").json["checks"]}
    assert states["msgspec"] == ("absent", "crelle serve: requests and responses (pip install 'crelle[server]')")
    assert states["aiohttp"][0] == "ok"


def test_doctor_says_what_runs_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    from crelle.kernels import cpu

    monkeypatch.setattr(cpu, "available", lambda: "is not built here")
    (check,) = [c for c in succeed("doctor", "--json").json["checks"] if c["what"] == "C++ kernels"]
    assert check["state"] == "absent"
    assert "torch kernels" in check["detail"]


def test_doctor_compiles_a_cuda_kernel_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crelle.kernels.cuda import jit

    def check() -> dict[str, str]:
        (found,) = [c for c in succeed("doctor", "--json").json["checks"] if c["what"] == "CUDA kernels"]
        return found  # type: ignore[no-any-return]

    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "_memory", {})
    first, second = check(), check()
    assert first["state"] == second["state"] == "ok"
    assert re.match(r"NVRTC \d+\.\d+ compiled a test kernel for sm_\w+ in \d+\.\d\d s", first["detail"])
    assert "in the cache" in second["detail"]

    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "SOURCES", tmp_path)
    assert check()["state"] == "problem"
    monkeypatch.setattr(jit, "missing", lambda: "pip install 'crelle[cuda]'")
    assert check() == {"what": "CUDA kernels", "state": "absent", "detail": "pip install 'crelle[cuda]'"}


# A user's mistakes -------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[str, str]] = {
    "no such model": ("inspect {tmp}/nowhere", "does not exist"),
    "no model there": ("inspect {tmp}", "has no config.json"),
    "no such text": ("eval {tiny} --text {tmp}/no.txt", "no.txt does not exist"),
    "window too long": (
        "eval {tiny} --text {text} --context 97",
        "a window of 97 tokens does not fit the model's context of 96",
    ),
    "tokens below one": ("eval {tiny} --text {text} --context 64 --tokens -1", "tokens must be at least 1"),
    "tokens in words": ("eval {tiny} --tokens many", "--tokens must be a number or 'all', got 'many'"),
    "context too long for the text": ("eval {tiny} --text {text} --context 90 --tokens 9", "lower --context"),
    "unknown scheme": ("quantize {tiny} {tmp}/q --scheme magic", "unknown scheme 'magic'"),
    "unknown setting": ("quantize {tiny} {tmp}/q --scheme rtn:colour=4", "has no setting 'colour'"),
    "group 0": ("quantize {tiny} {tmp}/q --scheme rtn:group=0", "group must be at least 1"),
    "bits 9": ("quantize {tiny} {tmp}/q --scheme bcq:bits=9", "bits must be 1 to 8, got 9"),
    "override without scheme": ("quantize {tiny} {tmp}/q --scheme fp16 --override x", "have the form PATTERN=SCHEME"),
    "override of nothing": ("quantize {tiny} {tmp}/q --scheme fp16 --override x=fp16", "'x' matches no matrix"),
    "target exists": (
        "quantize {tiny} {q} --scheme fp16",
        "already exists; choose another name, or replace it with --overwrite",
    ),
    "quantized twice": ("quantize {q} {tmp}/q --scheme fp16", "is already quantized"),
    "prompt too long": ("generate {tiny} --prompt " + "x" * 96, "the prompt has 97 tokens"),
    "no tokens": ("generate {tiny} --prompt x --max-tokens 0", "max_tokens must be at least 1"),
    "bad top-p": ("generate {tiny} --prompt x --top-p 2", "top_p must be above 0 and at most 1"),
    "huge seed": ("generate {tiny} --prompt x --seed 99999999999999999999", "seed must be between 0 and"),
    "unknown kernel": ("generate {tiny} --prompt x --kernel abacus", "there is no kernel 'abacus'"),
    "unknown device": ("generate {tiny} --prompt x --device tpu", "there is no device 'tpu'"),
    "no threads": ("generate {tiny} --prompt x --threads 0", "threads must be at least 1"),
    "no template": ("chat {no_template}", "no chat template"),
}


@pytest.fixture(scope="module")
def no_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("plain") / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    return path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_sentence_and_code_2(
    mistake: str, tiny_model: Path, quantized: Path, text: Path, no_template: Path, tmp_path: Path
) -> None:
    line, sentence = MISTAKES[mistake]
    places = {"tiny": tiny_model, "q": quantized, "text": text, "no_template": no_template, "tmp": tmp_path}
    args = [word.format(**places) for word in line.split()]
    result = run(*args, stdin="Hi\n")
    assert result.code == 2
    assert sentence in result.err
    assert result.err.strip().splitlines()[-1].startswith("crelle: ")
    as_json = run(*args, "--json", stdin="Hi\n")
    assert as_json.code == 2
    assert sentence in as_json.json["error"]


@pytest.mark.parametrize("command", [["generate", "--prompt", "-"], ["chat"]])
def test_standard_input_that_is_no_text_is_a_sentence(command: list[str], tiny_model: Path) -> None:
    result = run(command[0], tiny_model, *command[1:], stdin=b"\xff\xfe\xfa")
    assert result.code == 2
    assert "standard input is not UTF-8 text" in result.err
