"""What a million tokens cost: the hardware over its service life, and the electricity (ICCAD 2024, equation 11).

    model = CostModel.parse("price=30000,watt=700")
    model.per_million(tokens_per_second=500).total

    buying cost per hour  = price / service life            5 years unless said otherwise
    runtime cost per hour = price of a kWh x power          0.09 unless said otherwise
    total cost per hour   = the sum of both

The currency is that of the prices given.
"""

from dataclasses import dataclass
from typing import Self

from crelle.errors import SchemeError, UnsupportedError

_HOURS_OF_A_YEAR = 24 * 365
_NAMES = ("price", "watt", "kwh", "years")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a million tokens."""

    buying: float
    runtime: float
    total: float
    watt: float  # that the runtime cost was computed with


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the hardware costs and draws."""

    price: float  # of all of the hardware
    watt: float | None = None  # while it works; None: as measured
    kwh: float = 0.09  # price of a kilowatt-hour
    years: float = 5.0  # of service

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read price=…[,watt=…][,kwh=…][,years=…]."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if not equals or name not in _NAMES or name in found or not 0 <= number < float("inf"):
                raise SchemeError(
                    f"--cost should read price=30000,watt=700 with kwh= (the price of one, 0.09) and years= (5) if "
                    f"they are others, each once and none negative; got '{part.strip()}'"
                )
            found[name] = number
        if "price" not in found:
            raise SchemeError("--cost needs the price of the hardware: --cost price=30000,watt=700")
        if found.get("years") == 0:
            raise SchemeError("--cost years=0: hardware needs some time to pay for itself")
        return cls(**found)

    def per_million(self, tokens_per_second: float, measured_watt: float | None = None) -> Cost:
        """Return the cost of a million tokens, or say that the power is not known."""
        watt = measured_watt if self.watt is None else self.watt
        if watt is None:
            raise UnsupportedError("the power of this device cannot be measured: say it, --cost price=…,watt=…")
        hours = 1e6 / tokens_per_second / 3600
        buying = self.price / (self.years * _HOURS_OF_A_YEAR) * hours
        runtime = self.kwh * watt / 1000 * hours
        return Cost(buying, runtime, buying + runtime, watt)
