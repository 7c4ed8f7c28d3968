"""The default plan on a real GPU: what is allocated stays within it, and requests of all lengths are served."""

import random
from typing import cast

import pytest
import torch

from crelle import LLM, Sampling
from crelle.bench.load.model_sources import NoTokenizer
from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.engine.engine import Engine
from crelle.engine.memory.machine import free_memory
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.models.loader import build

pytestmark = pytest.mark.gpu


def random_model(context: int) -> LLM:
    """Two layers of Llama-2-7B with a short context, so that the tests beside this one keep most of the GPU."""
    config = llama_config(4096, 2, 32, 11008, context=context)
    weights = RandomWeights(config, "rtn:bits=4,group=128", "cuda")
    return LLM(build(weights, torch.device("cuda")), cast(Tokenizer, NoTokenizer()), weights)


def test_the_default_plan_is_kept_under_load() -> None:
    llm, rng = random_model(512), random.Random(0)
    torch.cuda.empty_cache()
    free = free_memory(torch.device("cuda"))
    before = torch.cuda.memory_allocated()  # the weights among it
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(llm)
    assert engine.plan.total <= 0.9 * (free.size + engine.plan.weights)
    assert (engine.plan.max_batch, engine.plan.tokens) == (256, 256 * (512 + 16))
    assert engine.plan.budget in (512, 1024, 2048)  # as much as the tests beside this one leave
    for _ in range(400):
        engine.add([rng.randrange(3, 30000) for _ in range(rng.randint(1, 500))], Sampling(max_tokens=8))
    engine.run()
    assert engine.stats.failed == 0
    assert engine.plan.weights + torch.cuda.max_memory_allocated() - before <= engine.plan.total


def test_a_context_of_a_billion_tokens_is_served_layer_by_layer() -> None:
    """Tables of the angles of a billion positions would take 512 GiB: the step without tables runs it."""
    llm = random_model(1 << 30)
    engine = Engine(llm, memory="2GB", max_batch=4, budget=256)
    assert engine.plan.total <= 2e9
    assert engine.runner.cuda_executor(None) is None
    handle = engine.add(list(range(3, 300)), Sampling(max_tokens=4), ignore_end=True)
    engine.run()
    assert handle.outputs[0].error is None
    assert len(llm.generate(list(range(3, 300)), Sampling(max_tokens=4)).tokens) >= 1
