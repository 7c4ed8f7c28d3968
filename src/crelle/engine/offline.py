"""A list of prompts through an engine of its own: offline inference, where all requests are known."""

from collections.abc import Sequence

from crelle.engine.engine import Engine
from crelle.engine.loaded_model import LoadedModel, Prompt
from crelle.engine.memory.defaults import choose_plan
from crelle.engine.requests.output import Completion
from crelle.engine.sampling.sampler import Sampling
from crelle.engine.speculation.settings import Speculation
from crelle.errors import SchemeError
from crelle.formats.kv.pages import KVFormat


def generate_all(
    llm: LoadedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    bits: int | None = None,
    kv: KVFormat | str | int | None = None,
    memory: str | int | None = None,
    max_batch: int | None = None,
    budget: int | None = None,
    batch_invariant: bool | None = None,
    speculate: Speculation | str | None = None,
) -> list[Completion]:
    """Continue many prompts at once, each with the same sampling or its own; the first error is raised.

    The options are those of Engine; without them the batch and the cache are what fits the machine and the prompts.
    """
    each = list(sampling) if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
    if len(each) != len(prompts):
        raise SchemeError(f"got {len(prompts)} prompts, but {len(each)} Samplings")
    if not prompts:
        return []
    ids = [llm.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    stored = llm.kv if kv is None else KVFormat.parse(kv)
    lengths = [len(i) + s.max_tokens for i, s in zip(ids, each, strict=True)]
    within = llm.memory if memory is None else memory
    limits = {"memory": within, "max_batch": max_batch, "budget": budget, "lengths": lengths}
    draft = None if llm.draft is None else llm.draft.model
    fits = choose_plan([llm.at(bits)], stored, draft=draft, **limits)  # type: ignore[arg-type]
    limits = {"pages": fits.pages, "max_batch": fits.max_batch, "budget": fits.budget}
    modes = {"batch_invariant": batch_invariant, "speculate": speculate}
    engine = Engine(llm, kv=stored, **modes, **limits)  # type: ignore[arg-type]
    handles = [engine.add(i, s, bits=bits) for i, s in zip(ids, each, strict=True)]
    engine.run()
    outputs = [handle.outputs[0] for handle in handles]
    if error := next((output.error for output in outputs if output.error), None):
        raise error
    return [output.completion for output in outputs]
