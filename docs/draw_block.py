"""Draws one decoder block as one rank of the group computes it, as docs/block.svg: `python docs/draw_block.py`.

Two lanes: on the left this rank's own tokens, on the right the tokens of the whole group. What crosses is a collective.
"""

from pathlib import Path

WIDTH, HEIGHT = 920, 856
LEFT, RIGHT = 190, 690  # centres of the lanes
BOX_WIDTH = {LEFT: 250, RIGHT: 330}
BOX_HEIGHT = 44
CENTRE = (LEFT + BOX_WIDTH[LEFT] / 2 + RIGHT - BOX_WIDTH[RIGHT] / 2) / 2
RESIDUAL = 32  # where the residual runs, left of the lane

COMPUTE, COLLECTIVE, LINE, TEXT, FAINT = "#dfe9f5", "#f6c56b", "#3c4a5a", "#1b2733", "#5d6b7a"


def draw_block() -> str:
    """Return the picture as the text of an SVG file."""
    parts = [*_frame()]
    y = 96
    # Attention.
    parts += _text(LEFT, y, "x_tD", weight="bold")
    start = y + 16
    parts += _down(LEFT, y + 8, y + 28)
    parts += _box(LEFT, y + 50, "RMS norm", "[t, D]")
    parts += _cross(y + 50, "all-gather", to_right=True)
    parts += _box(RIGHT, y + 50, "q, k, v of this rank's heads", "[T, D] → [T, hK], [T, gK]")
    parts += _down(RIGHT, y + 72, y + 94)
    parts += _box(RIGHT, y + 116, "q and k norm, rotary embedding", "full-width norms: one sum per token is reduced")
    parts += _down(RIGHT, y + 138, y + 160)
    parts += _box(RIGHT, y + 182, "causal attention, documents apart", "[T, hK], no S × S mask")
    parts += _down(RIGHT, y + 204, y + 226)
    parts += _box(RIGHT, y + 248, "o, this rank's columns", "[T, hK] → partial sums [T, D]")
    parts += _cross(y + 248, "reduce-scatter", to_right=False)
    parts += _add(y + 248, since=start)
    # Feed-forward.
    y += 300
    parts += _down(LEFT, y - 40, y + 28)
    parts += _box(LEFT, y + 50, "RMS norm", "[t, D]")
    parts += _cross(y + 50, "all-gather tokens", to_right=True)
    parts += _box(RIGHT, y + 50, "all tokens", "[T, D]")
    parts += _down(LEFT, y + 72, y + 104)
    parts += _box(LEFT, y + 126, "router, float32", "own tokens: best A of E experts")
    parts += _cross(y + 126, "all-gather ids, weights", to_right=True)
    parts += _down(RIGHT, y + 72, y + 104)
    parts += _box(RIGHT, y + 126, "permute: rows of this rank's experts", "[T, D], [T, A] → [R, D], sorted by expert")
    parts += _down(RIGHT, y + 148, y + 170)
    parts += _box(RIGHT, y + 192, "experts: gate and up, SwiGLU, down", "e of E experts, f of F channels: [R, D]")
    parts += _down(RIGHT, y + 214, y + 236)
    parts += _box(RIGHT, y + 258, "combine: weighted sum over A", "[R, D] → partial sums [T, D]")
    parts += _cross(y + 258, "reduce-scatter", to_right=False)
    parts += _add(y + 258, since=y - 8)
    parts += _down(LEFT, y + 270, y + 300)
    parts += _text(LEFT, y + 320, "x_tD, to the next block", weight="bold")
    notes = (
        "This is gather_tokens, the default. Transfers travel in chunks while products and the router run.",
        "gather_weights: tokens stay on the left, and the slices of the experts are gathered (ep = 1).",
        "all_to_all: each row travels to the rank of its expert alone, and back (ep = tp).",
        "A dense layer: gate, up and down with f of F channels in place of router, permute, experts and combine.",
    )
    for number, note in enumerate(notes):
        parts += _text(30, y + 370 + 24 * number, note, size=14, anchor="start", color=FAINT)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


def _frame() -> list[str]:
    """The background, the two lanes with their headings, and the head of an arrow."""
    lanes = []
    for lane, title, shape in (
        (LEFT, "tokens of this rank", "t = T / N"),
        (RIGHT, "tokens of the group", "T = B · S, on each of N ranks"),
    ):
        width = BOX_WIDTH[lane] + 40
        lanes.append(
            f'<rect x="{lane - width / 2:g}" y="14" width="{width}" height="722" rx="10" fill="#f5f7f9" '
            'stroke="#d4dae1"/>'
        )
        lanes += _text(lane, 40, title, weight="bold")
        lanes += _text(lane, 60, shape, size=13, color=FAINT)
    arrow = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{LINE}"/></marker></defs>'
    )
    return [arrow, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *lanes]


def _box(x: float, y: float, name: str, shape: str) -> list[str]:
    """A piece of work centred at (x, y), with the shape it makes."""
    width = BOX_WIDTH[int(x)]
    rect = (
        f'<rect x="{x - width / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{width}" height="{BOX_HEIGHT}" rx="6" '
        f'fill="{COMPUTE}" stroke="{LINE}"/>'
    )
    return [rect, *_text(x, y - 3, name), *_text(x, y + 14, shape, size=12, color=FAINT)]


def _cross(y: float, name: str, *, to_right: bool) -> list[str]:
    """A collective, drawn as an arrow between the lanes at height y."""
    left, right = LEFT + BOX_WIDTH[LEFT] / 2, RIGHT - BOX_WIDTH[RIGHT] / 2
    line = _line(left, y, right, y) if to_right else _line(right, y, LEFT + 14, y)
    width = 6.4 * len(name) + 18
    pill = (
        f'<rect x="{CENTRE - width / 2:g}" y="{y - 30:g}" width="{width:g}" height="22" rx="11" fill="{COLLECTIVE}"/>'
    )
    return [line, pill, *_text(CENTRE, y - 14, name, size=13)]


def _add(y: float, *, since: float) -> list[str]:
    """The sum with the residual that left the lane at `since`."""
    path = (
        f'<path d="M{LEFT} {since:g} H{RESIDUAL} V{y:g} H{LEFT - 14}" fill="none" stroke="{LINE}" '
        'stroke-width="1.5" marker-end="url(#head)"/>'
    )
    circle = f'<circle cx="{LEFT}" cy="{y:g}" r="12" fill="white" stroke="{LINE}"/>'
    return [path, circle, *_text(LEFT, y + 6, "+", size=18)]


def _down(x: float, start: float, end: float) -> list[str]:
    return [_line(x, start, x, end)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.5" '
        'marker-end="url(#head)"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 15,
    weight: str = "normal",
    anchor: str = "middle",
    color: str = TEXT,
) -> list[str]:
    return [
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{color}">{text}</text>'
    ]


if __name__ == "__main__":
    (Path(__file__).parent / "block.svg").write_text(draw_block())
