"""Reading values of a result file by name: what is missing or of another type is a sentence with its place."""

from collections.abc import Iterator
from typing import Any, NoReturn

from crelle.errors import FormatError
from crelle.formats.storage.io import shown

_LEAST, _MOST = 1e-12, 1e18  # nothing that is measured here is smaller or larger; an axis could not show it


class Fields:
    """A JSON object of a result file, and where it stands in it."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def has(self, *names: str) -> bool:
        return all(name in self for name in names)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        return value if isinstance(value, str) else self._wrong(name, "text", value)

    def number(self, name: str, zero: bool = False) -> float:
        """Return a number above 0, as times, sizes and perplexities are; `zero`: or 0."""
        value = self._value(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or _LEAST < value < _MOST):
            self._wrong(name, "a number", value)
        return float(value) if value or zero else self._wrong(name, "a number above 0", value)

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def count(self, name: str) -> int:
        value = self.number(name)
        return int(value) if value == int(value) else self._wrong(name, "a whole number", value)

    def numbers(self, name: str) -> list[float]:
        """Return the runs of a measurement: a number, or a list of them."""
        value = self._value(name, None)
        runs = value if isinstance(value, list) and value else [value]
        return [Fields({name: run}, self.where).number(name) for run in runs]

    def shape(self) -> tuple[int, int]:
        """Return a matrix's outputs and inputs, given as [N, K] or 'NxK'."""
        value = self._value("shape", None)
        parts = value.split("x") if isinstance(value, str) else value
        try:
            N, K = (int(part) for part in parts)
        except (TypeError, ValueError):
            self._wrong("shape", "outputs and inputs of a matrix", value)
        if N < 1 or K < 1:
            self._wrong("shape", "outputs and inputs of a matrix", value)
        return N, K

    def inner(self, name: str) -> "Fields":
        value = self._value(name, None)
        return (
            Fields(value, f"{self.where}, {name}") if isinstance(value, dict) else self._wrong(name, "a table", value)
        )

    def inner_or_empty(self, name: str) -> "Fields":
        return self.inner(name) if name in self else Fields({}, f"{self.where}, {name}")

    def rows(self, name: str) -> Iterator["Fields"]:
        value = self._value(name, None)
        if not isinstance(value, list) or not value:
            self._wrong(name, "a list of rows", value)
        for i, row in enumerate(value, 1):
            if not isinstance(row, dict):
                raise FormatError(f"{self.where}: row {i} of '{name}' should be a table, not {shown(row)}")
            yield Fields(row, f"{self.where}, row {i}")

    def first(self, name: str) -> "Fields":
        """Return the first of some rows; an empty one where there are none, which has none of the keys of any kind."""
        value = self.values.get(name)
        row = value[0] if isinstance(value, list) and value else None
        return Fields(row if isinstance(row, dict) else {}, f"{self.where}, row 1")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise FormatError(f"{self.where}: '{name}' is missing")
            return default
        return value

    def _wrong(self, name: str, expected: str, value: Any) -> NoReturn:
        raise FormatError(f"{self.where}: '{name}' should be {expected}, not {shown(value)}")
