"""Echo, prompt log-probabilities, penalties, embeddings, detokenization and reasoning over HTTP."""

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from tiny_server import Running, ask, body_of, nested_llm, post, serving, status

from crelle import LLM, Sampling
from crelle.engine.embedding import embed
from crelle.server.reasoning import ReasoningSplitter

LOGLIKELIHOOD: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(nested_llm()) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> LLM:
    return nested_llm("alone")


def test_echo_with_logprobs_is_what_lm_eval_asks_for(server: Running, alone: LLM) -> None:
    """The payload and the reading are those of lm-eval's local-completions: prompts as token ids, several at once."""
    texts = ["Hello there", "The capital of France is Paris", "Hello there, you"]
    prompts = [alone.tokenizer.encode(t) for t in texts]
    code, whole = ask(server, prompt=prompts, **LOGLIKELIHOOD)
    assert code == 200
    for ids, choice in zip(prompts, sorted(whole["choices"], key=lambda c: c["index"]), strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(ids) + 1
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        values = found["token_logprobs"][1:-1]
        logits = [alone_logprob(server, ids[:i], ids[i]) for i in range(1, len(ids))]
        assert values == pytest.approx(logits, abs=2e-3)
        each = zip(*(found[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
        for token, value, top in each:
            assert (token == max(top, key=top.get)) == (value == max(top.values()))
    assert whole["usage"]["completion_tokens"] == 3
    server.assert_empty()


def alone_logprob(server: Running, before: list[int], token: int) -> float:
    """Return the log-probability of a token as a sampled one."""
    more = {"logit_bias": {str(token): 100}, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    found = ask(server, prompt=before, **more)[1]["choices"][0]["logprobs"]["token_logprobs"]
    return float(found[0])


def test_echo_repeats_the_prompt_and_offsets_go_on(server: Running) -> None:
    plain = ask(server, prompt="Café!")[1]["choices"][0]["text"]
    code, whole = ask(server, prompt="Café!", echo=True, logprobs=2)
    choice = whole["choices"][0]
    assert (code, choice["text"]) == (200, "Café!" + plain)
    found = choice["logprobs"]
    assert found["text_offset"] == sorted(found["text_offset"])
    at = len(found["tokens"]) - whole["usage"]["completion_tokens"]
    assert found["text_offset"][at] == len("Café!")
    raw = server.raw(post("/v1/completions", json.dumps({**whole_body("Café!"), "stream": True}).encode()))
    events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]
    joined = [v for e in events if e["choices"][0]["logprobs"] for v in e["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined == found["token_logprobs"]
    nothing = ask(server, prompt="Café!", echo=True, max_tokens=0)[1]
    assert nothing["choices"][0]["text"] == "Café!"
    assert nothing["usage"]["completion_tokens"] == 0


def whole_body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "echo": True, "logprobs": 2}


def test_prompt_logprobs_are_vllms(server: Running) -> None:
    code, whole = ask(server, prompt=["Hello", "Hi you"], prompt_logprobs=2, n=2, temperature=1, seed=3)
    assert code == 200
    for choice in whole["choices"]:
        found = choice["prompt_logprobs"]
        ids = server.llm.tokenizer.encode("Hello" if choice["index"] < 2 else "Hi you")
        assert len(found) == len(ids)
        assert found[0] is None
        for token, some in zip(ids[1:], found[1:], strict=True):
            own = some[str(token)]
            better = [one for one in some.values() if one["logprob"] > own["logprob"]]
            assert own["rank"] > len(better)
            assert own["decoded_token"] == server.state.tokens.text(token)
            assert len(some) in (2, 3)


def test_min_tokens_and_penalties_reach_the_sampler(server: Running, alone: LLM) -> None:
    asked = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"70": 5}, "min_tokens": 3}
    want = alone.generate(
        "Hello",
        Sampling(max_tokens=12, frequency_penalty=1.5, presence_penalty=0.5, logit_bias=((70, 5.0),), min_tokens=3),
    )
    code, found = ask(server, **asked)
    assert (code, found["choices"][0]["text"]) == (200, want.text)
    assert want.text != alone.generate("Hello", Sampling(max_tokens=12)).text


def test_detokenize_is_the_inverse_of_tokenize(server: Running) -> None:
    for text in ("Hello there", "Café 🙂"):
        ids = body_of(server.raw(post("/tokenize", json.dumps({"prompt": text}).encode())))["tokens"]
        answer = server.raw(post("/detokenize", json.dumps({"tokens": ids}).encode()))
        assert (status(answer), body_of(answer)) == (200, {"prompt": text})


def test_embeddings_of_the_openai_client(server: Running, alone: LLM) -> None:
    texts = ["a cat sat", "a dog ran and ran", "x"]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
        plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
        last = client.embeddings.create(
            model="tiny", input=alone.tokenizer.encode(texts[0]), extra_body={"pooling": "last", "normalize": False}
        )
        for i, text in enumerate(texts):
            want = embed(alone, alone.tokenizer.encode(text))
            assert found.data[i].embedding == pytest.approx(want.tolist(), abs=1e-6)
            assert plain.data[i].embedding == pytest.approx(want.tolist(), abs=1e-6)
            assert math.isclose(float(np.linalg.norm(found.data[i].embedding)), 1.0, rel_tol=1e-5)
        ids = alone.tokenizer.encode(texts[0])
        assert last.data[0].embedding == pytest.approx(embed(alone, ids, "last", normalize=False).tolist(), abs=1e-6)
        assert found.usage.prompt_tokens == sum(len(alone.tokenizer.encode(t)) for t in texts)
        with pytest.raises(openai.BadRequestError, match="pooling must be one of"):
            client.embeddings.create(model="tiny", input="a", extra_body={"pooling": "max"})
    server.assert_empty()
    raw = server.raw(post("/v1/embeddings", json.dumps({"input": "x", "encoding_format": "base64"}).encode()))
    width = server.llm.model.spec.embedding_width
    assert len(base64.b64decode(body_of(raw)["data"][0]["embedding"])) == 4 * width


# Reasoning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "within", "want"),
    [
        ("<think>\nwhy\n</think>\n\nyes", False, ("\nwhy\n", "yes")),
        ("why</think>yes", True, ("why", "yes")),
        ("  <think>a</think>", False, ("a", "")),
        ("no thoughts <think>", False, ("", "no thoughts <think>")),
        ("never ends </thin", True, ("never ends </thin", "")),
        ("<thi", False, ("", "<thi")),
        ("a<b</think>c</think>", True, ("a<b", "c</think>")),
    ],
)
def test_reasoning_is_split_off_however_the_text_comes(text: str, within: bool, want: tuple[str, str]) -> None:
    for size in (1, 2, 3, 7, 100):
        splitter, found = ReasoningSplitter(within), ["", ""]
        for i in range(0, len(text), size):
            for place, piece in enumerate(splitter.push(text[i : i + size])):
                found[place] += piece
        for place, piece in enumerate(splitter.push("", final=True)):
            found[place] += piece
        assert tuple(found) == want
