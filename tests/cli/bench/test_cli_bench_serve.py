"""crelle bench serve and bench attention: JSON, result files, pictures, and sentences for what cannot be."""

import json
from pathlib import Path

import pytest
from in_process import run
from server.fake_server import FakeServer

from crelle.bench.kernels import attention as attention_bench
from crelle.bench.model_shapes import SHAPES

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,30,4\n2023-11-16 18:15:47.68,5,9\n"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bench, "_REPEAT", 2)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (path := tmp_path / "t.csv").write_text(TRACE)
    return path


def test_trace_as_json(tiny_model: Path, trace: Path) -> None:
    done = run("bench", "serve", tiny_model, "--trace", trace, "--rate", "50", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    row = done.json
    assert (row["requests"], row["failures"], row["tokens"], row["prompt_tokens"]) == (2, 0, 13, 35)
    assert row["traffic"] == "t.csv, 50 a second"
    assert row["first_token"]["p99"] >= row["first_token"]["p50"] > 0
    assert 0 < row["prefill_share"] < 1
    assert row["over_time"]


def test_everything_in_one_command_with_file_and_picture(tiny_model: Path, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "serve"
    loads = ("--batch", "1,3", "--clients", "1,2", "--seconds", "0.2", "--trace", trace, "--rate", "0")
    sizes = ("--context", "20", "--tokens", "4", "--prompt", "6", "--memory", "10MB", "--kv", "16", "--kv", "4")
    done = run("bench", "serve", tiny_model, *loads, *sizes, "--device", "cpu", "--out", out)
    assert done.code == 0, done.err
    result = json.loads(out.with_suffix(".json").read_text())
    rows = result["rows"]
    assert [r["batch"] for r in rows if "batch" in r and not r["memory"]] == [1, 3, 1, 3]
    sixteen, four = (r for r in rows if "batch" in r and r["memory"])
    assert four["batch"] > sixteen["batch"] > 3
    assert [r["clients"] for r in rows if "over_time" in r] == [1, 2, None] * 2
    assert sum("over_time" in r for r in rows) == 6
    assert result["command"].startswith("crelle bench serve")
    assert str(tmp_path) not in json.dumps(result)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for word in ("ms/step", "first token", "prompts", "preempted"):
        assert word in done.out
    out.with_suffix(".png").unlink()
    assert run("bench", "plot", out.with_suffix(".json")).code == 0
    assert out.with_suffix(".png").exists()


def test_shapes_and_schemes_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES["smollm2-135m"], "vocab_size", 1000)  # most of one layer's model is its vocabulary
    schemes = ("--scheme", "fp16", "--scheme", "rtn:bits=4,group=64")
    command = ("--shape", "smollm2-135m", "--layers", "1", *schemes, "--batch", "2", "--context", "16", "--tokens", "3")
    done = run("bench", "serve", *command, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert [(r["model"], r["scheme"]) for r in done.json["rows"]] == [
        ("smollm2-135m", "fp16"),
        ("smollm2-135m", "rtn:bits=4,group=64"),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--clients", "2"), "give one of MODEL"),
        (("--shape", "llama2-7b"), "choose a load"),
        (("--shape", "llama2-8b", "--clients", "2"), "there is no shape"),
        (("--shape", "llama2-7b", "--scheme", "nf4", "--clients", "2"), "nf4"),
        (("--shape", "llama2-7b", "--batch", "1,x"), "should read like"),
        (("--shape", "llama2-7b", "--clients", "0"), "--clients should read like"),
        (("--url", "http://127.0.0.1:9", "--batch", "1"), "does not apply to --url"),
    ],
)
def test_bad_options_are_sentences(options: tuple[str, ...], said: str) -> None:
    done = run("bench", "serve", *options)
    assert done.code != 0
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_a_row_that_does_not_fit_is_a_sentence_and_the_others_stand(tiny_model: Path) -> None:
    done = run(
        "bench", "serve", tiny_model, "--batch", "1", "--context", "20", "--tokens", "3", "--memory", "1kB", "--json"
    )
    assert done.code != 0
    assert len(done.json["rows"]) == 1
    assert "leaves no room for the KV cache" in next(iter(done.json["refused"].values()))


def test_a_load_that_no_engine_can_answer_is_a_sentence(tiny_model: Path) -> None:
    load = ("--clients", "2", "--seconds", "0.2", "--prompt", "100000")
    done = run("bench", "serve", tiny_model, *load, "--device", "cpu", "--json")
    assert done.code != 0
    assert "all 2 requests failed (2 times: " in done.err


def test_attention_as_json_and_table(tmp_path: Path) -> None:
    sizes = ("--batch", "2", "--context", "40", "--heads", "4/2", "--head-size", "16", "--device", "cpu")
    done = run("bench", "attention", *sizes, "--kv", "4", "--json")
    assert done.code == 0, done.err
    assert done.json["rel_err"] < 1e-5
    done = run("bench", "attention", *sizes, "--out", tmp_path / "a")
    assert done.code == 0, done.err
    assert "torch" in done.out
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 3
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--heads", "a"), "32/8"), (("--heads", "3/2"), "cannot share"), (("--dtype", "int8"), "int8")],
)
def test_bad_attention_options_are_sentences(options: tuple[str, ...], said: str) -> None:
    done = run("bench", "attention", "--device", "cpu", "--batch", "1", "--context", "4", *options)
    assert done.code != 0
    assert said in " ".join(done.err.split())


@pytest.mark.parametrize("load", [("--clients", "2", "--seconds", "60"), ("--trace",)], ids=["clients", "trace"])
def test_a_server_that_answers_nothing_is_a_sentence_and_no_file(
    load: tuple[str, ...], trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    with FakeServer(error_after=1) as server:
        options = (*load, trace) if "--trace" in load else load
        done = run("bench", "serve", "--url", server.url, *options, "--out", out, "--json")
    assert done.code == 2
    assert "requests to http://127.0.0.1" in done.err
    assert "failed" in done.err
    assert "The model ran out of pages." in done.err
    assert list(done.json) == ["error"]
    assert list(tmp_path.glob("r*")) == []


def test_a_server_without_a_chat_template_is_asked_for_completions(tmp_path: Path) -> None:
    with FakeServer(chats=False) as server:
        load = ("--clients", "2", "--seconds", "0.5", "--tokens", "3")
        done = run("bench", "serve", "--url", server.url, *load, "--out", tmp_path / "r")
        assert done.code == 0, done.err
        assert "has no chat template; measured /v1/completions" in done.out
        (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert (row["chat"], row["failures"]) == (False, 0)
        assert server.paths.count("/v1/chat/completions") == 1


def test_a_server_gets_the_same_load(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crelle.bench.load import http_load
    from crelle.bench.load.load_report import Call, LoadReport

    asked: dict[str, object] = {}

    def answer(clients: int | None) -> LoadReport:
        return LoadReport.of("http://s", "m", clients, 2.0, [Call(0.0, 1.0, "a", tokens=4, first=0.5, per_token=0.1)])

    def closed(url: str, **options: object) -> LoadReport:
        asked.update(options, url=url)
        return answer(3)

    def replay(url: str, arrivals: list[http_load.Arrival], **options: object) -> LoadReport:
        asked.update(options, arrivals=arrivals)
        return answer(None)

    monkeypatch.setattr(http_load, "run_closed_loop", closed)
    monkeypatch.setattr(http_load, "run_trace", replay)
    done = run(
        "bench", "serve", "--url", "http://s", "--clients", "3", "--seconds", "2", "--prompt", "7", "--tokens", "4"
    )
    assert done.code == 0, done.err
    assert "2.0" in done.out  # tokens per second
    assert (asked["url"], asked["clients"], asked["seconds"], asked["max_tokens"]) == ("http://s", 3, 2.0, 4)
    assert asked["extra"] is None
    prompts = asked["prompts"]
    assert isinstance(prompts, list)
    assert {len(p.split()) for p in prompts} == {7}
    assert len(set(prompts)) > 200
    out = tmp_path / "r"
    done = run("bench", "serve", "--url", "http://s", "--trace", trace, "--ignore-eos", "--json", "--out", out)
    assert done.json["tokens_per_second"] == 2.0
    assert json.loads(out.with_suffix(".json").read_text())["rows"] == [done.json]
    assert asked["extra"] == {"ignore_eos": True}
    arrivals = asked["arrivals"]
    assert isinstance(arrivals, list)
    assert [(round(a.at, 6), len(a.prompt.split()), a.max_tokens) for a in arrivals] == [(0, 30, 4), (1, 5, 9)]
