"""crelle warmup: compile the CUDA kernels of a model before it is used."""

from typing import Annotated

import typer

from crelle.cli.common.console import Json, Model, out, print_json, tracking, use_threads
from crelle.cli.common.option_groups import ModelOptions, model_options
from crelle.errors import SchemeError

NAME = "warmup"
_PAGES = 4  # of the cache: nothing is generated


@model_options
def run(
    model: Model,
    batch: Annotated[
        int, typer.Option("--batch", help="Maximum number of sequences that will be decoded together.")
    ] = 1,
    prompt: Annotated[int, typer.Option("--prompt", help="Length of the longest prompt, in tokens.")] = 512,
    *,
    options: ModelOptions,
    json: Json = False,
) -> None:
    """Compile the CUDA kernels of a model on all cores and store them in the cache.

    Without it, the first run of a model on a GPU compiles each kernel when it is first launched. On a CPU there is
    nothing to compile: the CPU kernels are built when Crelle is installed.

    **Example**: `crelle warmup out/smollm2-4bit --batch 16`
    """
    from crelle.engine.compile_ahead import compile_kernels, prompt_sizes
    from crelle.engine.engine import Engine
    from crelle.kernels.cuda.jit import kernel_directory

    if batch < 1 or prompt < 2:
        raise SchemeError(f"--batch must be at least 1 and --prompt at least 2, got {batch} and {prompt}")
    use_threads(options.threads)
    llm = options.load(model)
    engine = Engine(llm, pages=_PAGES)
    with tracking("compiling kernels") as track:
        count, seconds = compile_kernels(
            engine, range(1, batch + 1), prompt_sizes(prompt), progress=lambda done, of: track(done, of, "")
        )
    place = kernel_directory()
    if json:
        print_json({"kernels": count, "seconds": seconds, "device": str(llm.model.device), "cache": str(place)})
        return
    said = f"compiled {count} kernels in {seconds:.1f} s, stored in {place}" if count else "nothing to compile on a CPU"
    out.print(said, highlight=False, markup=False, soft_wrap=True)
