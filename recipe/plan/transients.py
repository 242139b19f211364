"""What is alive for a short time only: in a layer's backward, and around the head, at its fullest."""

from recipe.plan.activations import Rows, attention_products
from recipe.plan.memory_rows import Row, StepSizes
from recipe.plan.parameters import RankParameters


def head_transients(s: StepSizes, held: RankParameters) -> Rows:
    """Beside all layers' activations: with a slice's logits, or when gradients are sent (modeling/vocabulary.py)."""
    head, tokens = held.head or held.embedding, s.t * s.D * s.b
    stages = (_logits_stage(s, head), _scattered(s, where="the head"))
    return [
        Row("the layers' output, plain and normed", "activations", "2 t D b", 2 * tokens),
        Row("rotary tables, ids, targets", "activations", "32 T", 32 * s.T),
        Row("the head's gradient in float32", "logits", "4 v D", 4 * head),
        Row("gradient of its input", "logits", "t D b", tokens),
        *_gathered(s, "tokens for the head"),
        *_fullest(stages),
    ]


def _logits_stage(s: StepSizes, head: int) -> Rows:
    logits = s.c * s.v * (4 + (s.extra and s.b))
    product = s.extra and s.b * head
    return [
        Row("logits at a time, and their gradient", "logits", "c v (4 + b)", logits),
        Row("a slice's part of the head's gradient", "logits", "v D b", product),
        Row("gradients of gathered tokens", "logits", "T D b", s.T * s.D * s.b * s.cut),
    ]


def _fullest(stages: tuple[Rows, ...]) -> Rows:
    return max(stages, key=lambda rows: sum(row.num_bytes for row in rows))


def attention_transients(s: StepSizes, held: RankParameters) -> Rows:
    """All of a layer's attention but its inputs, in the backward of one of its parts."""
    residual = Row("gradient of the residual", "activations", "t D b", s.t * s.D * s.b)
    stages = (_outputs_stage(s), _softmax_stage(s, held), _norm_stage(s, held), _inputs_stage(s, held))
    return [residual, *_fullest(stages)]


def _outputs_stage(s: StepSizes) -> Rows:
    """Of the last product, whose input is put in the order of the chunks: each of them, and all in one tensor."""
    num = 1 if s.cut == 1 else 3
    return [
        *attention_products(s),
        Row("gradient of attention's output, or that and the output again", "activations", "q b", num * s.q * s.b),
        *_gathered(s, "gradients for attention"),
    ]


def _softmax_stage(s: StepSizes, held: RankParameters) -> Rows:
    """Of attention itself; a document's gradient of q is widened to all documents and added to that of the others."""
    num = 2 + s.joins
    return [
        *attention_products(s),
        Row("gradients of its output, q, k and v", "activations", "2 (q + k) b", (num * s.q + 2 * s.k) * s.b),
        _output_weights(s, held),
    ]


def _norm_stage(s: StepSizes, held: RankParameters) -> Rows:
    """Of the norm of q, in float32 and step by step, with k's behind."""
    if s.qk_norm == "none":
        return []
    if s.qk_norm == "head":
        formula, num = "(12 + extra + 2b) q + 2 k b", (12 + s.extra + 2 * s.b) * s.q + 2 * s.b * s.k
    else:
        formula, num = "20 q + (8 + b) k", 20 * s.q + (8 + s.b) * s.k
    made = Row("q's norm and its gradients, and those of k and v", "activations", formula, num)
    return [made, _output_weights(s, held)]


def _inputs_stage(s: StepSizes, held: RankParameters) -> Rows:
    """Of the products that make q, k and v: their gradients one by one, and under a mesh in one tensor."""
    each = (s.q + 2 * s.k) * s.b
    made = Row("gradients of q, k and v", "activations", "(q + 2k) b", each)
    if s.N == 1:
        return [made, Row("gradients of the input", "activations", "2 t D b", 2 * s.t * s.D * s.b)]
    weights = held.attention * s.b - _output_weights(s, held).num_bytes
    ordered = [Row("the same by chunk, and in their order", "activations", "2 (q + 2k) b", 2 * each)]
    sent = [
        Row("weights and their gradients in one tensor", "gradients", "2 (q + 2k) D b / T", 2 * weights),
        _output_weights(s, held),
        *_scattered(s, where="attention"),
    ]
    return [
        made,
        Row("the same in one tensor", "activations", "(q + 2k) b", each),
        *(_gathered(s, "tokens for attention") if s.regather else ()),
        *_fullest((ordered if s.cut < 1 else [], sent)),
    ]


def _output_weights(s: StepSizes, held: RankParameters) -> Row:
    share = s.q / (2 * (s.q + s.k))
    return Row("gradients of the last weights", "gradients", "q D b / T", share * held.attention * s.b)


def dense_transients(s: StepSizes, held: RankParameters) -> Rows:
    """Beside the four products kept: in the backward of the last product, of silu(gate) times up, or of gate and up."""
    residual = Row("gradient of the residual", "activations", "t D b", s.t * s.D * s.b)
    return [residual, *_fullest((_down_stage(s, held), _product_stage(s, held), _gate_up_stage(s, held)))]


def _down_stage(s: StepSizes, held: RankParameters) -> Rows:
    num = 1 if s.cut == 1 else 3  # the product is put in the order of the chunks: those, and all in one tensor
    return [
        Row("gradient of the product, or that and the product again", "activations", "T w b", num * s.T * s.w * s.b),
        Row("gradients of the last weights", "gradients", "D w b", held.dense * s.b / 3),
        *_gathered(s, "gradients for the dense layer"),
    ]


def _product_stage(s: StepSizes, held: RankParameters) -> Rows:
    """The product itself has gone; of its gradient those of both factors are made."""
    return [
        Row(
            "gradients of the product and its factors, less the product", "activations", "2 T w b", 2 * s.T * s.w * s.b
        ),
        Row("gradients of the last weights", "gradients", "D w b", held.dense * s.b / 3),
    ]


def _gate_up_stage(s: StepSizes, held: RankParameters) -> Rows:
    """Gradients have taken the place of all that was kept: under a mesh two, and the same in one tensor."""
    weights = Row("gradients of the weights", "gradients", "3 D w b", held.dense * s.b)
    if s.N == 1:
        return [weights, Row("gradients of the input", "activations", "2 t D b", 2 * s.t * s.D * s.b)]
    ordered = [Row("gradients by chunk, and in their order", "activations", "4 T w b", 4 * s.T * s.w * s.b)]
    sent = [Row("weights in one tensor", "gradients", "2 D w b", held.dense * s.b * 2 / 3), weights]
    return [
        *(_gathered(s, "tokens for the dense layer") if s.regather else ()),
        *_fullest((ordered if s.cut < 1 else [], [*sent, *_scattered(s, where="the dense layer")])),
    ]


def moe_transients(s: StepSizes, held: RankParameters) -> Rows:
    """In the backward of the experts: while tokens' gradients are made or sent, or when the weights' are."""
    stages = (_rows_stage(s), _send_stage(s, held), _weights_stage(s, held))
    return [*_experts_common(s), *_fullest(stages)]


def _experts_common(s: StepSizes) -> Rows:
    rows = [
        Row("gradient of the residual", "activations", "t D b", s.t * s.D * s.b),
        Row("gradient of the experts' input", "activations", "t D b", s.t * s.D * s.b),
        Row("activations and gradients of all rows", "activations", "3 R f b", 3 * s.R * s.f * s.b),
        Row("order of the rows", "activations", "16 T A + 8 R", 16 * s.T * s.A + 8 * s.R),
    ]
    if s.recomputes_rows:
        rows.append(Row("gate and up products, again", "activations", "2 R f b", 2 * s.R * s.cut * s.f * s.b))
    if s.N > 1 and s.strategy == "gather_tokens":
        rows += _gathered(s, "gradients for the experts")
        if s.regather:
            rows += _gathered(s, "tokens for the experts")
    if s.N > 1 and s.strategy == "gather_weights":
        whole = 3 * s.E * s.f * s.D * s.b
        rows.append(Row("all slices of the experts", "gathered", "3 E F D b", whole))
    return rows


def _rows_stage(s: StepSizes) -> Rows:
    """The loop holds one expert's rows, the grouped product those of all."""
    if s.static:
        return _grouped_rows_stage(s)
    sums = Row("sums of the tokens' gradients", "activations", "4 T D", 4 * s.worked_on * s.D * s.cut)
    rows = s.R / max(s.e, 1) * s.cut
    if s.extra:
        num = rows * max(3 * s.f * s.b + 2 * s.D * s.b, 14 * s.f + 2 * s.D, 4 * s.f + 6 * s.D)
    else:
        num = rows * (3 * s.f + 2 * s.D) * s.b
    return [sums, Row("rows of one expert", "activations", "(R / e) (3f + 2D) b", num)]


def _grouped_rows_stage(s: StepSizes) -> Rows:
    """Of the grouped product: the rows' gradients are made, multiplied with activations, or summed by token."""
    rows = s.R * s.cut
    products = 5 * rows * s.f * s.b
    gathered = rows * (2 * s.D - s.f) * s.b
    weighted = rows * s.f * (12 if s.extra else 4)
    summed = rows * s.D * s.b + (16 if s.A > 1 else 12) * s.worked_on * s.D * s.cut
    return [
        Row("products and gradients of rows", "activations", "5 R f b", products),
        Row("outputs' gradients, or sums by token", "activations", "R D b + 16 T D", max(gathered, weighted, summed)),
    ]


def _send_stage(s: StepSizes, held: RankParameters) -> Rows:
    """What goes home: tokens' gradients, or those of all slices of the experts."""
    if s.N > 1 and s.strategy == "gather_weights":
        own = held.experts * s.b
        whole = own * s.N
        second = (whole + (s.extra and 4 * (whole + own) // s.b)) if s.sent else 0
        return [
            Row("gradients of all slices, and as sent", "gradients", "6 E F D b", 2 * whole + second),
            Row("gradients of the experts", "gradients", "3 e f D b", own),
        ]
    return _scattered(s, where="the experts") if s.strategy == "gather_tokens" else []


def _weights_stage(s: StepSizes, held: RankParameters) -> Rows:
    own = held.experts * s.b * (s.N if s.strategy == "gather_weights" else 1)
    gradients = Row("gradients of the experts", "gradients", "3 e f D b", own)
    if s.static:
        return [gradients, Row("gradients of outputs", "activations", "R D (b + 4)", s.R * s.D * (s.b + 4))]
    outputs = s.R / max(s.e, 1) * s.D * (2 * s.b + 4)
    return [gradients, Row("gradients of an expert's outputs", "activations", "(R / e) D (2b + 4)", outputs)]


def _scattered(s: StepSizes, *, where: str) -> Rows:
    """A rank's sums on their way: what is sent, gloo's second buffer and its float32 sums, and the result."""
    if s.N == 1:
        return []
    num = s.T * s.D * s.b
    if s.sent:
        num += s.T * s.D * s.b + (s.extra and 4 * (s.T + s.t) * s.D)
    return [
        Row(f"sums sent from {where}", "activations", "T D b", num),
        Row(f"sums for {where}", "activations", "t D b", s.t * s.D * s.b),
    ]


def _gathered(s: StepSizes, what: str) -> Rows:
    return [Row(what, "gathered", "T D b", s.T * s.D * s.b)] if s.N > 1 else []
