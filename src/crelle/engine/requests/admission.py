"""What a request may ask for."""

from crelle.engine.loaded_model import LoadedModel
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import SchemeError

MAX_LOGPROBS = 20  # most likely tokens that can be asked for with each token


def require_possible(llm: LoadedModel, sampling: Sampling, **logprobs: int | None) -> None:
    """Say what of a request no engine over this model can do; logprobs: counts of likely tokens, by name."""
    for name, most in logprobs.items():
        if most is not None and not 0 <= most <= MAX_LOGPROBS:
            raise SchemeError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {most}")
    if sampling.min_tokens > sampling.max_tokens:
        raise SchemeError(f"min_tokens is {sampling.min_tokens}, above max_tokens, {sampling.max_tokens}; lower it")
    vocabulary = llm.model.spec.vocabulary
    if bad := [token for token, _ in sampling.logit_bias if token >= vocabulary]:
        raise SchemeError(f"logit_bias has token id {bad[0]}, outside the vocabulary of {vocabulary}")
