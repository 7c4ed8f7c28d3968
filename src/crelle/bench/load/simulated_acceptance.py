"""An acceptance that is chosen, for models whose guesses mean nothing: a model and a draft model of random weights.

Everything runs at its real cost: the draft model, the step that verifies its guesses, what the host does. Only the
comparison is by lot: a guess counts as right with a probability, and the sequence goes on with it; one that does not is
followed by another token than was guessed.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.engine.engine import Engine
from crelle.engine.loaded_model import LoadedModel
from crelle.engine.model_runner import ModelRunner
from crelle.engine.scheduler import Step
from crelle.errors import SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.step.graph_inputs import PendingTokens


def simulate_acceptance(engine: Engine, probability: float) -> None:
    """Let each guess of an engine that has not run yet count as right with a probability."""
    if not 0 <= probability <= 1:
        raise SchemeError(f"an acceptance is a probability, 0 to 1; got {probability:g}")
    runner, pages = engine.runner, engine.blocks.pages
    engine.runner = _ByLot(engine.llm, engine.kv, pages, probability, batch_invariant=runner.batch_invariant)


class _ByLot(ModelRunner):
    """Runs the model as ever, and changes what comes after a guess."""

    def __init__(
        self, llm: LoadedModel, kv: KVFormat, pages: int, probability: float, *, batch_invariant: bool
    ) -> None:
        super().__init__(llm, kv, pages, batch_invariant=batch_invariant)
        self._probability, self._random = probability, random.Random(0)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        logits = super().run(step)
        if step.drafted:
            chosen = self._chosen(step, [-1] * len(logits))
            for row, token in ((row, token) for row, token in enumerate(chosen) if token >= 0):
                logits[row] = 0.0
                logits[row, token] = 1.0
        return logits

    def start(self, step: Step) -> PendingTokens:
        pending = super().start(step)
        return _Chosen(pending, step, self) if step.drafted else pending

    def _chosen(self, step: Step, tokens: Sequence[int]) -> list[int]:
        """Return the tokens after each row, those after which a guess stands being chosen by lot."""
        found, at = list(tokens), 0
        for chunk in (c for c in step.chunks for _ in c.samples):
            for i, guess in enumerate(chunk.draft, at):
                if self._random.random() < self._probability:
                    found[i] = guess
                elif found[i] in (guess, -1):
                    found[i] = (guess + 1) % self.llm.model.spec.vocabulary
            at += 1 + len(chunk.draft)
        return found


class _Chosen(PendingTokens):
    """Tokens of which some are chosen once they are there."""

    def __init__(self, pending: PendingTokens, step: Step, runner: _ByLot) -> None:
        self._pending, self._step, self._runner = pending, step, runner

    def tokens(self) -> list[int]:
        return self._runner._chosen(self._step, self._pending.tokens())


__all__ = ["simulate_acceptance"]
