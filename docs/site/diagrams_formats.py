"""Pictures of bit-planes: binary-coded, uniform and affine, nested."""

from drawing import Drawing

CELL, LEFT, GAP = 34, 120, 20
HUES = "abc"


def _x(i: int) -> int:
    """Return where input i of two groups of 8 stands."""
    return LEFT + CELL * i + GAP * (i // 8)


def _number(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _inputs(d: Drawing, words: tuple[str, str]) -> None:
    for group, w in enumerate(words):
        d.text(_x(8 * group), 26, w, "soft")


def bcq() -> Drawing:
    d = Drawing(720, 322, "One row of a binary-coded matrix with three planes")
    planes = ["-+-++----++--++-", "-+--++--+++-++--", "-++-+-++-+++++--"]
    alpha, z = [(0.52, 0.24, 0.11), (0.40, 0.21, 0.07)], (0.05, -0.10)
    _inputs(d, ("inputs 0 … 7: group 0, one byte a plane", "inputs 8 … 15: group 1"))
    for p, (signs, hue) in enumerate(zip(planes, HUES, strict=True)):
        d.text(14, 66 + CELL * p, f"plane {p}", bold=True)
        for i, sign in enumerate(signs):
            d.cell(_x(i), 45 + CELL * p, "+" if sign == "+" else "−", hue, filled=sign == "+")
    d.text(14, 186, "per group", bold=True)
    for g in (0, 1):
        d.box(_x(8 * g), 162, 269, 56, round_=4)
        d.text(_x(8 * g) + 12, 185, "α = " + ", ".join(f"{a:.2f}" for a in alpha[g]) + f"    z = {_number(z[g])}")
        d.text(_x(8 * g) + 12, 206, "f16; together 8 levels, anywhere", "soft", size=12)
    d.text(14, 251, "weights", bold=True)
    values = [
        z[i // 8] + sum(a * (1 if s[i] == "+" else -1) for a, s in zip(alpha[i // 8], planes, strict=True))
        for i in range(16)
    ]
    for i, value in enumerate(values):
        d.middle(_x(i) + 15, 251, _number(value).lstrip("+"), size=11)
    d.text(LEFT, 283, f"w = z + Σ αₚ bₚ        input 1: 0.05 + 0.52 + 0.24 + 0.11 = {values[1]:.2f}")
    d.text(LEFT, 305, "bits per weight: P + 16 (P + 1) / G", "soft")
    return d


def uniform() -> Drawing:
    d = Drawing(720, 356, "Uniform and affine groups")
    codes = [4, 1, 6, 3, 3, 0, 5, 7, 2, 5, 1, 4, 7, 0, 3, 6]
    _inputs(d, ("inputs 0 … 7: group 0", "inputs 8 … 15: group 1"))
    d.text(14, 66, "codes q", bold=True)
    for i, q in enumerate(codes):
        d.cell(_x(i), 45, str(q), "a", filled=False)
    d.text(14, 84, "3 bits,", "soft", size=11)
    d.text(14, 97, "as 3 planes", "soft", size=11)
    for p in range(3):  # the planes under the codes: plane 0 is the most significant
        for i, q in enumerate(codes):
            d.box(_x(i), 80 + 8 * p, 31, 7, f"f-{HUES[p]}" if q >> (2 - p) & 1 else f"s-{HUES[p]}")
    d.text(14, 142, "per group", bold=True)
    for g, words in enumerate(("scale f16 = 0.10, zero (3 bits) = 3", "scale f16 = 0.08, zero (3 bits) = 4")):
        d.box(_x(8 * g), 120, 269, 36, round_=4)
        d.text(_x(8 * g) + 12, 143, words)
    for k, (name, equation, low, cost) in enumerate(
        [
            ("uniform", "w = scale (q − zero): 0 is a level", -0.30, "P + (16 + P) / G bits per weight"),
            ("affine", "w = low + scale q: begins anywhere", -0.27, "P + 32 / G; low is f16"),
        ]
    ):
        y = 214 + 78 * k
        d.text(14, y + 4, name, bold=True)
        d.line(LEFT, y, LEFT + 560, y)
        zero = LEFT + 280
        d.line(zero, y - 12, zero, y + 8, "s-red")
        d.middle(zero, y - 17, "0", "red", size=11)
        for q in range(8):
            value = low + 0.10 * q
            x = zero + value * 420
            d.box(x - 4, y - 4, 8, 8, "f-a", round_=4)
            d.middle(x, y + 22, str(q), "soft", size=11)
        d.text(LEFT, y + 42, equation)
        d.text(LEFT + 292, y + 42, cost, "soft")
    return d


def nested() -> Drawing:
    d = Drawing(720, 300, "Nested planes: 2, 3 and 4 bits in the same codes")
    codes = [9, 3, 12, 6, 7, 1, 10, 14, 4, 11, 2, 8, 15, 0, 5, 13]
    _inputs(d, ("inputs 0 … 7: group 0", "inputs 8 … 15: group 1"))
    hues = ("a", "a", "b", "c")
    for p in range(4):
        d.text(14, 66 + CELL * p, f"plane {p}", bold=True)
        for i, q in enumerate(codes):
            bit = q >> (3 - p) & 1
            d.cell(_x(i), 45 + CELL * p, str(bit), hues[p], filled=bool(bit))
    for k, (bits, hue) in enumerate(((2, "a"), (3, "b"), (4, "c"))):
        y = 204 + 22 * k
        d.box(LEFT, y - 11, 12, 12, f"f-{hue}")
        first = f"read planes 0 … {bits - 1}"
        d.text(LEFT + 22, y, f"{bits} bits: {first}")
        d.text(
            LEFT + 202, y, f"w = low_{bits} + scale_{bits} (q >> {4 - bits})" if bits < 4 else "w = low_4 + scale_4 q"
        )
        d.text(LEFT + 430, y, f"input 0: q = {codes[0] >> (4 - bits)}", "soft")
    d.text(
        LEFT, 282, "each precision has a scale and a low (f16) per group: P + 32 precisions / G bits per weight", "soft"
    )
    return d
