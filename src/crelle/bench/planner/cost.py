"""What a million tokens cost: the hardware over its service life, and the electricity (ICCAD 2024, equation 11).

    model = CostModel.parse("price=30000,watt=700")
    model.per_million(tokens_per_second=500).total

    buying cost per hour  = price / service life            5 years unless said otherwise
    runtime cost per hour = price of a kWh x power          0.09 unless said otherwise
    total cost per hour   = the sum of both

Prices are in US dollars unless `currency=` names another unit, which is printed with every cost.
"""

from dataclasses import dataclass
from typing import Self

from crelle.errors import SchemeError, UnsupportedError

_HOURS_OF_A_YEAR = 24 * 365
_NAMES = ("price", "watt", "kwh", "years")
CURRENCY = "USD"  # of the default price of a kWh, and of costs that name no other
_LONGEST = 8  # characters of a currency


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a million tokens."""

    buying: float
    runtime: float
    total: float
    watt: float  # that the runtime cost was computed with
    currency: str = CURRENCY


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the hardware costs and draws."""

    price: float  # of all of the hardware
    watt: float | None = None  # while it works; None: as measured
    kwh: float = 0.09  # price of a kilowatt-hour
    years: float = 5.0  # of service
    currency: str = CURRENCY

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read price=…[,watt=…][,kwh=…][,years=…][,currency=…]."""
        found: dict[str, float] = {}
        currency: str | None = None
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name == "currency" and currency is None and 0 < len(value) <= _LONGEST and value.isprintable():
                currency = value
                continue
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if not equals or name not in _NAMES or name in found or not 0 <= number < float("inf"):
                raise SchemeError(
                    f"--cost should read price=30000,watt=700, with kwh= (price of a kWh, default 0.09), years= (5) "
                    f"and currency= (USD) if they differ, each once and none negative; got '{part.strip()}'"
                )
            found[name] = number
        if "price" not in found:
            raise SchemeError("--cost needs the price of the hardware: --cost price=30000,watt=700")
        if found.get("years") == 0:
            raise SchemeError("--cost years=0: hardware needs some time to pay for itself")
        return cls(**found, currency=currency or CURRENCY)

    def per_million(self, tokens_per_second: float, measured_watt: float | None = None) -> Cost:
        """Return the cost of a million tokens, or say that the power is not known."""
        watt = measured_watt if self.watt is None else self.watt
        if watt is None:
            raise UnsupportedError("the power of this device cannot be measured: say it, --cost price=…,watt=…")
        hours = 1e6 / tokens_per_second / 3600
        buying = self.price / (self.years * _HOURS_OF_A_YEAR) * hours
        runtime = self.kwh * watt / 1000 * hours
        return Cost(buying, runtime, buying + runtime, watt, self.currency)
