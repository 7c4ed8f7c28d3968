"""Pictures of formats with several precisions in one matrix: mixed 2/4/16, Atom; and of a page of the KV cache."""

from drawing import Drawing


def mixed() -> Drawing:
    d = Drawing(760, 388, "2, 4 and 16 bits in one matrix")
    four = {1, 6}  # of 8 groups of 16 inputs
    left, top, width, row = 96, 62, 74, 20
    outliers = {(0, 2), (2, 4), (4, 0), (7, 5), (9, 3)}
    d.text(left, 24, "K inputs, in groups of 16; a group has 2 or 4 bits for all outputs", "soft")
    d.text(14, top + 4 * row, "N outputs", "soft")
    for g in range(8):
        hue = "a" if g in four else "c"
        d.middle(left + g * width + 35, 50, "4 bits" if g in four else "2 bits", bold=g in four, size=12)
        for r in range(11):
            if r == 10:
                d.middle(left + g * width + 35, top + 10 * row + 12, "⋮", "soft")
                continue
            d.box(left + g * width, top + r * row, width - 6, row - 4, f"f-{hue}")
            if (r, g) in outliers:
                x, y = left + g * width + 18 + 9 * (g % 4), top + r * row + 8
                d.box(x - 5, y - 5, 10, 10, "f-red", round_=5)
    y = top + 11 * row + 16
    d.box(left, y - 11, 12, 12, "f-c")
    d.text(left + 20, y, "2-bit group: w = s (q − z)")
    d.text(left + 212, y, "s = second_scale (scale_code + second_zero)")
    d.text(
        left + 20,
        y + 17,
        "scale_code: 4 bits an output; second_scale (f16) and second_zero: for 16 outputs",
        "soft",
        size=12,
    )
    d.box(left, y + 30, 12, 12, "f-a")
    d.text(left + 20, y + 41, "4-bit group: w = row_scale (q − row_zero)")
    d.text(left + 320, y + 41, "f16 and 4 bits for each output", "soft", size=12)
    d.box(left, y + 54, 12, 12, "f-red", round_=6)
    d.text(left + 20, y + 65, "outlier, from 2-bit groups only")
    d.text(left + 232, y + 65, "f16, added to what its code stands for; CSR with 16-bit columns", "soft", size=12)
    return d


def atom() -> Drawing:
    d = Drawing(760, 392, "Atom: integer weights and activations, outlier channels in 8 bits")
    names = ["c3", "c0", "c5", "c1", "c6", "c7", "c2", "c4"]
    left, width = 130, 72
    large = {"c2", "c4"}
    d.text(14, 30, "x, as it comes", bold=True)
    for i in range(8):
        name = f"c{i}"
        d.box(left + i * width, 14, width - 6, 26, "f-red" if name in large else "s-b")
        d.middle(left + i * width + 33, 32, name, "on-red" if name in large else "ink", size=12)
    for j, name in enumerate(names):
        i = int(name[1])
        d.line(left + i * width + 33, 43, left + j * width + 33, 88, "s-red" if name in large else "line")
    d.text(14, 70, "perm: outliers last", "soft", size=12)
    for y, what, small in ((92, "x, encoded", "int4"), (176, "W, stored", "int4")):
        d.text(14, y + 18, what, bold=True)
        for j, name in enumerate(names):
            wide = name in large
            d.box(left + j * width, y, width - 6, 30, "f-red" if wide else "f-b")
            d.middle(left + j * width + 33, y + 20, "int8" if wide else small, "on-red" if wide else "on-b", size=12)
        for first, last, words in ((0, 2, "group 0"), (3, 5, "group 1"), (6, 7, "outliers")):
            x1, x2 = left + first * width, left + last * width + width - 6
            d.line(x1, y + 37, x2, y + 37)
            scale = "a scale a token" if what.startswith("x") else "a scale an output"
            d.middle((x1 + x2) / 2, y + 53, f"{words}: {scale}" if last - first > 1 else "own scale", "soft", size=12)
    d.text(14, 262, "product", bold=True)
    d.text(left, 262, "y = Σ over groups of  scale_x · scale_w · (integer dot product)")
    d.text(left, 290, "Below 8 bits x is first rotated in blocks of 128 channels (Hadamard), outliers not;")
    d.text(left, 308, "the columns of W are stored rotated, so the product stays the same.")
    d.text(left, 336, "Here a group is 3 channels; in use group = 128 and 128 outlier channels.", "soft")
    d.text(left, 356, "bits per weight: ((K − n) bits + 8 n) / K + 16 C / K, and perm 32 / N", "soft")
    d.text(left, 376, "levels=2: one f16 scale a row and small integer scales for the groups inside it", "soft")
    return d


def kv() -> Drawing:
    d = Drawing(760, 412, "A page of the 4-bit KV cache")
    d.text(14, 32, "block table", bold=True)
    for i, page in enumerate((7, 2, 9)):
        d.cell(120 + 36 * i, 12, str(page), "a", filled=i == 1, size=31)
    d.text(238, 32, "pages of a sequence, in order; token t lies in page t // 16 at place t % 16", "soft")
    d.line(171, 46, 171, 70, arrow=True)
    d.text(14, 92, "a page", bold=True)
    for half, words in enumerate(("keys", "values")):
        x = 120 + half * 316
        d.box(x, 74, 304, 122, round_=4)
        d.text(x + 10, 92, f"{words}: 16 tokens of each head", size=12)
        for head in range(2):
            d.text(x + 10, 121 + head * 42, f"head {head}", "soft", size=11)
            for token in range(16):
                d.box(x + 54 + token * 15, 102 + head * 42, 12, 30, "f-c" if token < 11 else "s-c")
    d.line(180, 178, 180, 214, arrow=True)
    d.text(14, 240, "a token of", bold=True)
    d.text(14, 256, "a head", bold=True)
    for g in range(2):
        x = 120 + g * 316
        for i in range(8):
            d.cell(
                x + 26 * i,
                222,
                ("9", "4", "12", "7", "0", "15", "6", "10")[i] if g == 0 else "·",
                "b",
                filled=False,
                size=24,
                font=11,
            )
        d.text(x + 26 * 8 + 6, 239, "… 32 codes", "soft", size=12)
        d.text(x, 268, f"group {g}: x = scale (code − zero)", size=12)
    d.text(14, 312, "a group's", bold=True)
    d.text(14, 328, "16 bits", bold=True)
    for i in range(16):
        hue, letter = ("a", "e") if i < 5 else ("b", "m") if i < 10 else ("c", "z")
        d.cell(120 + 28 * i, 294, letter, hue, filled=True, size=26, font=12)
    d.text(584, 304, "scale: f16 with exponent e", "soft", size=12)
    d.text(584, 320, "and mantissa m; zero = z/4", "soft", size=12)
    d.text(120, 352, "Keys are stored as H (k − c), values as H v: H a Hadamard rotation, c the centre of the layer's")
    d.text(120, 369, "keys. Neither is undone when pages are read, and neither costs a bit.")
    d.text(
        120,
        393,
        "bits per value: bits + 16 C / D; 4.5 with groups of 32 channels, 3.56 times the tokens of f16",
        "soft",
    )
    return d
