"""Mixed precision: bits and group size of every matrix with the least predicted loss at a given size.

Every matrix has one setting; sizes add up, and so, to second order, do the losses
(crelle.quantizers.search.sensitivity). That is the multiple-choice knapsack problem, and dynamic programming over the
size solves it exactly:

    best_i[c] = min over settings s of  best_{i-1}[c - size_i(s)] + loss_i(s)          c in units of size

The unit is the greatest common divisor of all differences of sizes, so nothing is rounded, unless that would make more
than a quarter of a million units: then sizes are rounded up. One table holds the whole Pareto front.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from crelle.errors import SchemeError
from crelle.formats.base import format_of
from crelle.quantizers.base import BitConfig, GroupedConfig
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.search.sensitivity import Sensitivity
from crelle.quantizers.solvers.fast_error import Setting

Per = Literal["matrix", "kind"]
Sizes = Mapping[str, Mapping[Setting, int]]  # bits of each module at each setting

RECIPE = GPTQ(free=True)
_UNITS = 1 << 18


def kind_of(module: str) -> str:
    """Return the sub-layer's kind, e.g. down_proj."""
    return module.rpartition(".")[2]


def stored_bits(recipe: GroupedConfig, setting: Setting, shape: tuple[int, int]) -> int:
    """Return the bits that a matrix [N, K] takes at a setting, every scale counted: N times those of one row."""
    spec = recipe.storage_at(setting, shape) if isinstance(setting, BitConfig) else setting.storage(shape)
    return shape[0] * format_of(spec).row_bits(spec)


def sizes_of(sensitivities: Sequence[Sensitivity], recipe: GroupedConfig = RECIPE) -> dict[str, dict[Setting, int]]:
    """Return the bits of every matrix at every setting that was measured."""
    known: dict[tuple[Setting, tuple[int, int]], int] = {}
    for one in sensitivities:
        for setting in one.losses:
            if (setting, one.shape) not in known:
                known[setting, one.shape] = stored_bits(recipe, setting, one.shape)
    return {one.module: {s: known[s, one.shape] for s in one.losses} for one in sensitivities}


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting for every matrix."""

    choices: dict[str, Setting]
    bits_per_weight: float  # over these matrices, every scale counted
    loss: float  # predicted increase
    recipe: GroupedConfig = RECIPE
    notes: dict[str, Any] = field(default_factory=dict)  # how it was made; goes into the file

    @property
    def scheme(self) -> str:
        """The recipe with the most common setting: for matrices that are not named."""
        return self._at(Counter(self.choices.values()).most_common(1)[0][0])

    @property
    def overrides(self) -> dict[str, str]:
        """Every module with its scheme, for `crelle quantize --override` and `quantize(overrides=...)`."""
        return {module: self._at(setting) for module, setting in self.choices.items()}

    def _at(self, setting: Setting) -> str:
        return str(self.recipe.at(setting) if isinstance(setting, BitConfig) else setting)


@dataclass(frozen=True, slots=True)
class _Item:
    """Matrices that share one setting, with its Pareto-optimal settings: larger ones lose less."""

    modules: tuple[str, ...]
    settings: tuple[Setting, ...]
    sizes: tuple[int, ...]  # ascending
    losses: tuple[float, ...]  # descending


class ParetoFront:
    """The best plan at every size up to `most_bits` per weight (None: no limit)."""

    def __init__(
        self,
        sensitivities: Sequence[Sensitivity],
        sizes: Sizes | None = None,
        *,
        recipe: GroupedConfig = RECIPE,
        per: Per = "matrix",
        most_bits: float | None = None,
        units: int = _UNITS,
    ) -> None:
        if not sensitivities:
            raise SchemeError("the model has no matrix to choose bits for")
        self.recipe = recipe
        self.weights = sum(math.prod(one.shape) for one in sensitivities)
        self._items = _items(sensitivities, sizes or sizes_of(sensitivities, recipe), per)
        self._floor = sum(item.sizes[0] for item in self._items)
        ceiling = sum(item.sizes[-1] for item in self._items)
        most = ceiling if most_bits is None else min(ceiling, math.floor(most_bits * self.weights + 1e-6))
        room = max(0, most - self._floor)
        divisor = math.gcd(*(size - item.sizes[0] for item in self._items for size in item.sizes))
        self._unit = max(1, divisor, -(-room // units))
        self._best, self._picks = self._table(room // self._unit)

    def _cost(self, item: _Item, s: int) -> int:
        return -(-(item.sizes[s] - item.sizes[0]) // self._unit)

    def _table(self, room: int) -> tuple[np.ndarray, np.ndarray]:
        best = np.zeros(room + 1)
        picks = np.zeros((len(self._items), room + 1), dtype=np.uint8)
        for pick, item in zip(picks, self._items, strict=True):
            now = best + item.losses[0]
            for s in range(1, len(item.settings)):
                cost = self._cost(item, s)
                if cost > room:
                    break
                other = best[: room + 1 - cost] + item.losses[s]
                won = other < now[cost:]
                now[cost:][won] = other[won]
                pick[cost:][won] = s
            best = now
        return best, picks

    @property
    def least_bits(self) -> float:
        """The size of the smallest plan."""
        return self._floor / self.weights

    def at(self, target_bits: float) -> Plan:
        """Return the best plan of at most that many bits per weight."""
        room = math.floor(target_bits * self.weights + 1e-6) - self._floor
        if room < 0 or math.isnan(target_bits):
            raise SchemeError(
                f"the smallest plan of these settings has {self.least_bits:.3f} bits per weight, "
                f"more than the target of {target_bits:g}; allow fewer bits or larger groups"
            )
        return self._plan(min(room // self._unit, len(self._best) - 1))

    def _plan(self, room: int) -> Plan:
        choices: dict[str, Setting] = {}
        bits, loss = 0, 0.0
        for item, picks in zip(reversed(self._items), self._picks[::-1], strict=True):
            s = int(picks[room])
            room -= self._cost(item, s)
            bits, loss = bits + item.sizes[s], loss + item.losses[s]
            choices |= dict.fromkeys(reversed(item.modules), item.settings[s])
        return Plan(dict(reversed(choices.items())), bits / self.weights, loss, self.recipe)

    def plans(self, count: int = 40) -> list[Plan]:
        """Return plans from the smallest to the largest, each with less loss than the one before."""
        found: list[Plan] = []
        for room in np.unique(np.linspace(0, len(self._best) - 1, count).round().astype(int)):
            plan = self._plan(int(room))
            if not found or plan.loss < found[-1].loss:
                found.append(plan)
        return found


def _items(sensitivities: Sequence[Sensitivity], sizes: Sizes, per: Per) -> list[_Item]:
    together: dict[str, list[Sensitivity]] = {}
    for one in sensitivities:
        together.setdefault(kind_of(one.module) if per == "kind" else one.module, []).append(one)
    items = []
    for name, members in together.items():
        common = [s for s in members[0].losses if all(s in m.losses for m in members)]
        every = [(sum(sizes[m.module][s] for m in members), sum(m.losses[s] for m in members), s) for s in common]
        options = sorted(every, key=lambda option: option[:2])
        if not all(math.isfinite(loss) for _, loss, _ in options) or not options:
            raise SchemeError(f"the sensitivities of '{name}' are not finite; the model may be damaged")
        useful = [options[0]]
        for option in options[1:]:  # drop dominated settings: larger and no better
            if option[1] < useful[-1][1]:
                useful.append(option)
        bits, losses, settings = zip(*useful, strict=True)
        items.append(_Item(tuple(m.module for m in members), settings, bits, losses))
    return items


def choose(
    sensitivities: Sequence[Sensitivity],
    sizes: Sizes | None,
    target_bits: float,
    *,
    recipe: GroupedConfig = RECIPE,
    per: Per = "matrix",
) -> Plan:
    """Return the plan with the least predicted loss in at most `target_bits` per weight."""
    return ParetoFront(sensitivities, sizes, recipe=recipe, per=per, most_bits=target_bits).at(target_bits)


def uniform(
    sensitivities: Sequence[Sensitivity], setting: Setting, sizes: Sizes | None = None, recipe: GroupedConfig = RECIPE
) -> Plan:
    """Return the plan with one setting for all, to compare with."""
    sizes = sizes or sizes_of(sensitivities, recipe)
    weights = sum(math.prod(one.shape) for one in sensitivities)
    bits = sum(sizes[one.module][setting] for one in sensitivities)
    choices = {one.module: setting for one in sensitivities}
    return Plan(choices, bits / weights, sum(one.losses[setting] for one in sensitivities), recipe)
