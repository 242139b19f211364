"""What a layer's forward leaves for its backward, tensor by tensor, in eager execution."""

from recipe.plan.memory_rows import Row, StepSizes

Rows = list[Row]


def attention_kept(s: StepSizes) -> Rows:
    """The attention half, with the two residuals."""
    return [*attention_inputs(s), *attention_products(s)]


def attention_inputs(s: StepSizes) -> Rows:
    """What is needed to the end of the backward."""
    residuals = Row("layer's input, and after attention", "activations", "2 t D b", 2 * s.t * s.D * s.b)
    return [residuals, _tokens_kept(s, "attention")]


def attention_products(s: StepSizes) -> Rows:
    """What goes with the gradients of q, k and v."""
    b, positions = s.b, s.T * s.h
    rows = [
        Row("q, k and v", "activations", "(q + 2k) b", (s.q + 2 * s.k) * b),
        Row("attention's output", "activations", "2 q b" if s.joins else "q b", (1 + s.joins) * s.q * b),
        Row("log-sum-exps, norms' scales", "activations", "4 (T h + 2t)", 4 * (positions + 2 * s.t)),
    ]
    if s.qk_norm == "head":
        scales = 4 * positions * (1 + s.k / s.q)
        rows.append(Row("q and k before their norms", "activations", "(q + k) b + 4 T h", (s.q + s.k) * b + scales))
    elif s.qk_norm == "full":
        rows.append(Row("q and k before and in their norms", "activations", "8 (q + k)", 8 * (s.q + s.k)))
    if s.clips:
        rows.append(Row("q, k and v before clipping", "activations", "(q + 2k) b", (s.q + 2 * s.k) * b))
    return rows


def moe_kept(s: StepSizes) -> Rows:
    """Router and experts."""
    rows = [
        Row("router's input", "activations", "4 t D", 4 * s.t * s.D),
        Row("router's logits and scores", "activations", "8 t E", 8 * s.t * s.E),
        Row("router's choice and its weights", "activations", "20 t A", 20 * s.t * s.A),
    ]
    if s.strategy == "all_to_all" and s.N > 1:
        returned = 8 * s.t * s.A * s.D
        rows += [
            Row("rows that came", "activations", "R D b", s.R * s.D * s.b),
            Row("outputs that came back, plain and weighted", "activations", "8 t A D", returned),
            Row("their order and slots", "activations", "20 R + 8 t A", 20 * s.R + 8 * s.t * s.A),
        ]
    else:
        gathers = s.strategy == "gather_tokens"
        if s.keeps_gathered and gathers:
            rows.append(Row("tokens gathered for the experts", "gathered", "T D b", s.T * s.D * s.b))
        elif s.extra:
            rows.append(Row("experts' input", "activations", "t D b", s.t * s.D * s.b))
        num = s.T if gathers else s.t
        rows.append(Row("slots of all tokens' choices", "activations", "8 T A", 8 * num * s.A))
        if s.N > 1 and gathers:
            rows.append(Row("weights of all tokens' choices", "activations", "4 T A", 4 * num * s.A))
    if not s.recomputes_rows:
        rows.append(Row("gate and up products", "activations", "2 R f b", 2 * s.R * s.f * s.b))
    return rows


def dense_kept(s: StepSizes) -> Rows:
    """A layer without experts: gate, up, silu(gate), and silu(gate) times up."""
    return [_tokens_kept(s, "the dense layer"), Row("its products", "activations", "4 T w b", 4 * s.T * s.w * s.b)]


def _tokens_kept(s: StepSizes, where: str) -> Row:
    if s.keeps_gathered:
        return Row(f"tokens gathered for {where}", "gathered", "T D b", s.T * s.D * s.b)
    return Row(f"normed input of {where}", "activations", "t D b", s.t * s.D * s.b)
