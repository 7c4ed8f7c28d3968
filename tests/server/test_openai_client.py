"""The official openai client against the server: what it reads is what LLM.generate says."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from server_fixtures import llm  # noqa: F401
from tiny_server import Running, nested_llm, serving, slow_down

from crelle import LLM, Sampling
from crelle.server.settings import Keys

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TEXTS = ["Hello", "Once upon a time", "a", "Café au lait, très chaud"]


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(llm) as found:
        yield found


def connect(server: Running, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with connect(server) as found:
        yield found


@pytest.fixture(autouse=True)
def _empty(server: Running) -> Iterator[None]:
    yield
    server.assert_empty()


@pytest.fixture(scope="module")
def alone() -> LLM:
    return nested_llm("alone")


def chat_ids(llm: LLM) -> list[int]:
    return llm.tokenizer.encode_chat(list(MESSAGES))


# Completions ----------------------------------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny") == model


@pytest.mark.parametrize("bits", [None, 2, 3, 4])
def test_greedy_completion_is_that_of_generate(client: OpenAI, alone: LLM, bits: int | None) -> None:
    got = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=20, temperature=0, extra_body={"precision": bits}
    )
    want = alone.generate("Hello", Sampling(max_tokens=20), bits=bits)
    assert got.choices[0].text == want.text
    assert got.choices[0].finish_reason == want.finish_reason
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (want.prompt_tokens, len(want.tokens))


def test_many_clients_at_once_each_get_their_own_answer(client: OpenAI, alone: LLM) -> None:
    want = {text: alone.generate(text, Sampling(max_tokens=12)).text for text in TEXTS}

    def ask(text: str) -> tuple[str, str]:
        got = client.completions.create(model="tiny", prompt=text, max_tokens=12, temperature=0)
        return text, got.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        for text, got in pool.map(ask, TEXTS * 6):
            assert got == want[text]


def test_several_prompts_and_several_texts_are_numbered_in_order(client: OpenAI, alone: LLM) -> None:
    ids = [alone.tokenizer.encode(text) for text in TEXTS]
    asked: list[Any] = [TEXTS, ids]
    for prompts in asked:
        got = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0, n=2)
        assert [c.index for c in got.choices] == list(range(8))
        want = [alone.generate(text, Sampling(max_tokens=8)).text for text in TEXTS for _ in range(2)]
        assert [c.text for c in got.choices] == want
        assert got.usage is not None
        assert got.usage.prompt_tokens == sum(map(len, ids))


def test_token_ids_are_a_prompt(client: OpenAI, alone: LLM) -> None:
    got = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=8, temperature=0)
    assert got.choices[0].text == alone.generate([5, 6, 7], Sampling(max_tokens=8)).text


def test_seed_gives_the_same_text_again_and_the_text_of_generate(client: OpenAI, alone: LLM) -> None:
    def ask(n: int) -> list[str]:
        got = client.completions.create(model="tiny", prompt="Hello", max_tokens=16, temperature=1.3, seed=5, n=n)
        return [c.text for c in got.choices]

    assert ask(3) == ask(3)
    assert len(set(ask(3))) == 3
    want = alone.generate("Hello", Sampling(max_tokens=16, temperature=1.3, seed=5))
    assert ask(1) == [want.text] == ask(3)[:1]


def test_stop_strings_are_not_part_of_the_text(client: OpenAI, alone: LLM) -> None:
    whole = alone.generate("Hello", Sampling(max_tokens=30)).text
    stop = whole[8:10]
    for given in (stop, [stop, "never-seen"]):
        got = client.completions.create(model="tiny", prompt="Hello", max_tokens=30, temperature=0, stop=given)
        assert got.choices[0].text == whole[: whole.index(stop)]
        assert got.choices[0].finish_reason == "stop"


def test_ignore_eos_goes_on_behind_the_end(
    client: OpenAI, server: Running, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = alone.generate("Hello", Sampling(max_tokens=12))
    monkeypatch.setattr(server.llm, "end_ids", frozenset({whole.tokens[4]}))
    for ignore in (False, True):
        got = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=12, temperature=0, extra_body={"ignore_eos": ignore}
        )
        assert got.choices[0].finish_reason == ("length" if ignore else "stop")
        assert (got.choices[0].text == whole.text) == ignore


def test_streamed_completion_is_the_whole_one(client: OpenAI, alone: LLM) -> None:
    want = alone.generate("Café", Sampling(max_tokens=40))
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt="Café",
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == want.text
    assert len({c.id for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == want.finish_reason
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(want.tokens)
    assert len(chunks) > 5, "it comes in pieces"


def test_completion_logprobs(client: OpenAI, server: Running) -> None:
    options: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 9, "temperature": 0}
    found = client.completions.create(**options, logprobs=3).choices[0]
    logprobs = found.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 9
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
    ):
        assert value == max(top.values()), "greedy takes the likeliest"
        assert top[token] == value
        assert 0 < sum(map(math.exp, top.values())) <= 1.0001
    raw = b"".join(
        bytes.fromhex(t[6:].replace("\\x", "")) if t.startswith("bytes:") else t.encode() for t in logprobs.tokens
    )
    assert raw.decode(errors="replace") == found.text
    assert logprobs.text_offset == sorted(logprobs.text_offset or [])
    assert (logprobs.text_offset or [1])[0] == 0
    plain = client.completions.create(**options, logprobs=0).choices[0].logprobs
    assert plain is not None
    assert plain.top_logprobs is None
    streamed = list(client.completions.create(**options, logprobs=3, stream=True))
    parts = [c.choices[0].logprobs for c in streamed]
    assert [t for p in parts if p for t in p.tokens or []] == logprobs.tokens
    assert [o for p in parts if p for o in p.text_offset or []] == logprobs.text_offset


# Chat -----------------------------------------------------------------------------------------------------------------


def test_greedy_chat_is_that_of_generate(client: OpenAI, alone: LLM) -> None:
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    want = alone.generate(chat_ids(alone), Sampling(max_tokens=20))
    message = got.choices[0].message
    assert (message.role, message.content) == ("assistant", want.text)
    follow: Any = [*MESSAGES, message, {"role": "user", "content": [{"type": "text", "text": "And?"}]}]
    again = client.chat.completions.create(model="tiny", messages=follow, max_completion_tokens=5, temperature=0)
    assert again.usage is not None
    assert again.usage.completion_tokens <= 5
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens is not None
    assert again.usage.prompt_tokens_details.cached_tokens >= 16, "the conversation so far was in the cache"


def test_streamed_chat_of_several_texts(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 1.2, "seed": 3, "n": 3}
    whole = [c.message.content for c in client.chat.completions.create(**options).choices]
    found, ends = {0: "", 1: "", 2: ""}, {}
    roles = []
    for chunk in client.chat.completions.create(**options, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert list(found.values()) == whole
    assert roles == ["assistant"] * 3
    assert ends.keys() == {0, 1, 2}


def test_chat_logprobs(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "temperature": 0, "logprobs": True}
    found = client.chat.completions.create(**options, top_logprobs=4).choices[0]
    assert found.logprobs is not None
    content = found.logprobs.content or []
    assert len(content) == 9
    assert all(t.logprob == t.top_logprobs[0].logprob and len(t.top_logprobs) == 4 for t in content)
    assert bytes(b for t in content for b in t.bytes or []).decode(errors="replace") == found.message.content
    bare = client.chat.completions.create(**options).choices[0].logprobs
    assert bare is not None
    assert [t.logprob for t in bare.content or []] == [t.logprob for t in content]
    streamed = client.chat.completions.create(**options, top_logprobs=4, stream=True)
    parts = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert [(t.token, t.logprob) for t in parts] == [(t.token, t.logprob) for t in content]


def test_chat_without_a_limit_goes_on_to_the_end(llm: LLM) -> None:
    with serving(llm, engine={"pages": 8}) as small, connect(small) as client:
        got = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
        assert got.usage is not None
        assert got.choices[0].finish_reason == "stop" or got.usage.total_tokens == 8 * 16 + 1
        small.assert_empty()


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "param", "says"),
    [
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", "must be at least 0, not -1"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "at most 2"),
        ({"top_p": 0}, openai.BadRequestError, "top_p", "above 0"),
        ({"prompt": ""}, openai.BadRequestError, "prompt", "needs at least 1"),
        ({"prompt": []}, openai.BadRequestError, "prompt", "must be a string or an array"),
        ({"prompt": [999]}, openai.BadRequestError, "prompt[0]", "at most 258"),
        ({"prompt": "x" * 2100}, openai.BadRequestError, "prompt", "the model's context of 2048"),
        ({"prompt": "x" * 20000}, openai.BadRequestError, "prompt", "at most 16384"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs", "at most 20"),
        ({"stop": ["a", ""]}, openai.BadRequestError, "stop[1]", "at least 1"),
        ({"echo": 1}, openai.BadRequestError, "echo", "true or false"),
        ({"logit_bias": {"259": 1}}, openai.BadRequestError, "logit_bias", "token ids below 259"),
        ({"frequency_penalty": 3}, openai.BadRequestError, "frequency_penalty", "at most 2"),
        ({"model": "other"}, openai.NotFoundError, "model", "this server has 'tiny'"),
        ({"extra_body": {"precision": 7}}, openai.BadRequestError, "precision", "one of 2, 3, 4"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, None, 'unknown parameter "temprature"'),
        ({"n": 17}, openai.BadRequestError, "n", "at most 16"),
    ],
)
def test_errors_are_the_clients_exceptions(
    client: OpenAI, options: Any, error: type[openai.APIStatusError], param: str | None, says: str
) -> None:
    asked: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, **options}
    with pytest.raises(error, match=says.replace("[", r"\[")) as caught:
        client.completions.create(**asked)
    assert caught.value.param == param
    assert caught.value.code
    assert caught.value.type


def test_unknown_page_and_method(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown path"):
        client.moderations.create(model="tiny", input="x")
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/models", cast_to=object, body={})
    assert caught.value.status_code == 405


def test_a_full_queue_is_a_rate_limit(llm: LLM) -> None:
    with serving(llm, engine={"queue_limit": 1, "max_batch": 1}) as busy, connect(busy) as client:
        slow_down(busy.engine, 0.05)
        stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=400, temperature=0, stream=True)
        next(stream)  # it runs: the next one waits
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.completions.create, model="tiny", prompt="a", max_tokens=1)
            while not busy.engine.stats.waiting:
                time.sleep(0.01)
            with pytest.raises(openai.RateLimitError, match="1 requests are waiting") as caught:
                client.completions.create(model="tiny", prompt="b", max_tokens=1)
            assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 60
            stream.close()
            assert waiting.result(20).usage is not None
        busy.assert_empty()


def test_keys_are_asked_for(llm: LLM) -> None:
    with serving(llm, keys=Keys.of("sesame", "simsim")) as shut:
        for key in ("sesame", "simsim"):
            with connect(shut, key) as client:
                assert client.completions.create(model="tiny", prompt="Hello", max_tokens=2).choices
        for key in ("sesam", "sesame2", "x" * 5000):
            with connect(shut, key) as client, pytest.raises(openai.AuthenticationError, match="valid API key"):
                client.models.list()
        shut.assert_empty()
        for secret in ("sesame", "simsim"):
            assert secret not in shut.log
