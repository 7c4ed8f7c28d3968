"""crelle generate: continue a prompt."""

import sys
from typing import Annotated

import typer

from crelle.cli.console import Device, Json, KernelName, Model, Threads, err, print_json, reading_input, use_threads

NAME = "generate"

MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 = always the most likely token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 = all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens of this total probability.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens less likely than this share of the best one.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: repeat less.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End at this string; repeatable.")]


def run(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue; - reads it from standard input.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    device: Device = "auto",
    threads: Threads = None,
    kernel: KernelName = None,
    json: Json = False,
) -> None:
    """Continue a prompt and show the text as it comes.

    **Examples**

    `crelle generate out/smollm2-3bit --prompt "The capital of France is" --max-tokens 20`

    `crelle generate model.gguf --prompt - --temperature 0.8 --top-p 0.95 --seed 1 < prompt.txt`
    """
    from crelle.engine.llm import LLM
    from crelle.engine.sampler import Sampling

    use_threads(threads)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    with reading_input():
        text = sys.stdin.read() if prompt == "-" else prompt
    llm = LLM.load(model, device=device, kernel=kernel)
    pieces = llm.stream(text, sampling)
    if not json:
        print(text, end="", flush=True)
    for piece in pieces:
        if not json:
            print(piece.text, end="", flush=True)
        if done := piece.completion:
            if json:
                print_json(done)
                return
            print()
            err.print(
                f"{len(done.tokens)} tokens, {done.tokens_per_second:.1f} per second, "
                f"first after {done.first_token_seconds:.2f} s, ended by {done.finish_reason}",
                style="dim",
            )
