"""From a checked body to what the engine is asked."""

from dataclasses import dataclass
from typing import Any

from crelle.engine.sampler import Sampling
from crelle.engine.tokenizer import Message, Tokenizer
from crelle.server import schemas
from crelle.server.errors import ApiError
from crelle.server.schemas import ModelInfo
from crelle.server.validation import Schema, check

_LEAST = 1e-6  # of top_p: keeps the likeliest token alone, as anything smaller would, which f32 takes for 0

Prompts = list[str] | list[list[int]] | list[Message]  # prompts, prompts as ids, or one conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One HTTP request for completions. Its prompts are not tokenized yet: that can take a while."""

    chat: bool
    prompts: Prompts
    sampling: Sampling  # with max_tokens as asked; `most` is what there is room for
    max_tokens: int | None
    n: int
    bits: int | None
    logprobs: int | None  # likely tokens to tell of; None: no logprobs
    ignore_end: bool
    stream: bool
    usage: bool  # at the end of a stream

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Tokenize; a conversation becomes one prompt."""
        if self.chat:
            return [tokenizer.encode_chat(self.prompts)]  # type: ignore[arg-type]
        return [tokenizer.encode(t) if isinstance(t, str) else _integers(t) for t in self.prompts]  # type: ignore[arg-type]

    @property
    def characters(self) -> int:
        return _characters(self.prompts)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """One HTTP request for token ids."""

    chat: bool
    prompts: Prompts  # a prompt or a conversation
    bos: bool = True  # whether the prompt starts with BOS where the tokenizer has one

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        if self.chat:
            return tokenizer.encode_chat(self.prompts)  # type: ignore[arg-type]
        return tokenizer.encode(self.prompts[0], self.bos)  # type: ignore[arg-type]

    @property
    def characters(self) -> int:
        return _characters(self.prompts)


class RequestParser:
    """Reads the bodies of requests to one model."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self._completion, self._chat, self._tokenize = (
            schemas.completion(info),
            schemas.chat(info),
            schemas.tokenize(info),
        )

    def completion(self, body: Any) -> GenerationRequest:
        self._check(body, self._completion)
        prompt = body["prompt"]
        several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
        prompts = prompt if several else [prompt]
        most = int(_of(body, "max_tokens", min(16, self.info.max_tokens)))
        return self._parsed(body, prompts, most, body.get("logprobs"))

    def chat(self, body: Any) -> GenerationRequest:
        self._check(body, self._chat)
        limits = [body.get("max_tokens"), body.get("max_completion_tokens")]
        most = min((int(n) for n in limits if n is not None), default=None)
        told = body.get("top_logprobs") or (0 if body.get("logprobs") else None)
        return self._parsed(body, self._conversation(body["messages"]), most, told)

    def tokenize(self, body: Any) -> Tokenize:
        self._check(body, self._tokenize)
        if "messages" in body:
            return Tokenize(True, self._conversation(body["messages"]))
        return Tokenize(False, [body["prompt"]], bool(_of(body, "add_special_tokens", True)))

    def _check(self, body: Any, schema: Schema) -> None:
        name = body.get("model") if isinstance(body, dict) else None
        if isinstance(name, str) and name != self.info.name:
            raise not_served(name, self.info)
        if isinstance(body, dict) and body.get("precision") is not None and not self.info.precisions:
            why = "this model has one precision only; checkpoints of the scheme bcq-nested have several"
            raise ApiError(400, why, param="precision", code="invalid_value")
        check({k: v for k, v in body.items() if k != "precision"} if self._no_choice(body) else body, schema)

    def _no_choice(self, body: Any) -> bool:
        """Whether a precision is named, as null, where there is only one: that asks for nothing."""
        return isinstance(body, dict) and not self.info.precisions and "precision" in body

    def _conversation(self, messages: list[dict[str, Any]]) -> list[Message]:
        """Join the parts of messages; a developer speaks as the system, which is the name that templates know."""
        found: list[Message] = []
        for m in messages:
            content = m["content"]
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            found.append({"role": "system" if m["role"] == "developer" else m["role"], "content": text})
        if (n := sum(len(m["content"]) for m in found)) > self.info.max_prompt:
            why = f"messages have {n} characters together, but at most {self.info.max_prompt} are allowed"
            raise ApiError(400, why, param="messages", code="context_length_exceeded")
        return found

    def _parsed(
        self, body: dict[str, Any], prompts: Prompts, most: int | None, logprobs: float | None
    ) -> GenerationRequest:
        stop = body.get("stop") or ()
        seed = body.get("seed")
        sampling = Sampling(
            temperature=float(_of(body, "temperature", 1.0)),
            top_k=int(_of(body, "top_k", 0)),
            top_p=max(float(_of(body, "top_p", 1.0)), _LEAST),
            min_p=float(_of(body, "min_p", 0.0)),
            repetition_penalty=float(_of(body, "repetition_penalty", 1.0)),
            seed=None if seed is None else int(seed),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        bits = body.get("precision")
        return GenerationRequest(
            chat="messages" in body,
            prompts=prompts,
            sampling=sampling,
            max_tokens=most,
            n=int(_of(body, "n", 1)),
            bits=None if bits is None else int(bits),
            logprobs=None if logprobs is None else int(logprobs),
            ignore_end=bool(body.get("ignore_eos")),
            stream=bool(body.get("stream")),
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )


def not_served(name: str, info: ModelInfo) -> ApiError:
    shown = name if len(name) <= 100 else name[:100] + "…"
    why = f"the model '{shown}' is not served here; '{info.name}' is"
    return ApiError(404, why, param="model", code="model_not_found")


def _integers(ids: list[int]) -> list[int]:
    """Write 3.0 as 3; a list without such is not copied: the garbage collector would have to walk through both."""
    return ids if set(map(type, ids)) <= {int} else list(map(int, ids))


def _characters(prompts: Prompts) -> int:
    """Count what is to be tokenized."""
    return sum(len(t if isinstance(t, str) else t["content"]) for t in prompts if isinstance(t, str | dict))


def _of(body: dict[str, Any], name: str, default: Any) -> Any:
    """Return a parameter, where null means the default."""
    value = body.get(name)
    return default if value is None else value
