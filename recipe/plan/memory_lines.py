"""The lines of a memory plan that the model itself takes: what a layer keeps for its backward, and what is short-lived.

Each line is one expression in the letters of `Letters`. On plain numbers it gives bytes; on letters that know their
names it gives the same bytes and the formula that they were computed by. Only dominant
terms are counted: a peak is within 10 % of the storages that live in a real step.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from modeling.cost import MATRICES
from recipe.plan.job import Job
from recipe.plan.parameters import RankParameters, rank_parameters


class Term(float):
    """A number that knows the expression it was computed by: arithmetic on it gives terms.

    Of alternatives (`max`, `min`) a term is the one that was taken.
    """

    text: str
    is_sum: bool

    def __new__(cls, value: float, text: str, *, is_sum: bool = False) -> "Term":
        made = super().__new__(cls, value)
        made.text, made.is_sum = text, is_sum
        return made

    @property
    def _factor(self) -> str:
        return f"({self.text})" if self.is_sum else self.text

    def __add__(self, other: float) -> "Term":
        return self if not other else Term(float(self) + other, f"{self.text} + {_text(other)}", is_sum=True)

    def __radd__(self, other: float) -> "Term":
        return self if not other else Term(other + float(self), f"{_text(other)} + {self.text}", is_sum=True)

    def __sub__(self, other: float) -> "Term":
        return Term(float(self) - other, f"{self.text} - {_text(other, as_factor=True)}", is_sum=True)

    def __rsub__(self, other: float) -> "Term":
        return Term(other - float(self), f"{_text(other)} - {self._factor}", is_sum=True)

    def __mul__(self, other: float) -> "Term":
        is_quotient = "/" in re.sub(r"\(.*?\)", "", self.text)  # which "a / b c" would not show
        left = f"({self.text})" if is_quotient else self._factor
        return _scaled(self, other, f"{left} {_text(other, as_factor=True)}")

    def __rmul__(self, other: float) -> "Term":
        return _scaled(self, other, f"{_text(other, as_factor=True)} {self._factor}")

    def __truediv__(self, other: float) -> "Term":
        divisor = _text(other, as_factor=True)
        divisor = f"({divisor})" if " " in divisor and not divisor.startswith("(") else divisor
        return (
            self
            if other == 1 and not isinstance(other, Term)
            else Term(float(self) / other, f"{self._factor} / {divisor}")
        )

    def __ceil__(self) -> int:
        return Term(math.ceil(float(self)), f"ceil({self.text})")  # type: ignore[return-value]


def _text(number: float, *, as_factor: bool = False) -> str:
    if isinstance(number, Term):
        return number._factor if as_factor else number.text
    return f"{number:.10g}"


def _scaled(term: Term, other: float, text: str) -> Term:
    text = re.sub(r"^([\d.]+) (?=\d)", r"\1 x ", text)  # two numbers would read as one
    return term if other == 1 and not isinstance(other, Term) else Term(float(term) * other, text)


def text_of(number: float) -> str:
    """Return the expression that a number was computed by, or the number where it is none."""
    return _text(number)


class Letter(NamedTuple):
    """What a letter stands for, and its value in a micro-batch of a job, given what a rank holds of the model."""

    meaning: str
    of: Callable[[Job, RankParameters], float]


LETTERS: Mapping[str, Letter] = {
    "T": Letter("tokens of a group", lambda job, _: job.num_tokens),
    "t": Letter("tokens of a rank", lambda job, _: job.tokens_per_rank),
    "N": Letter("ranks of a group", lambda job, _: job.layout.tp),
    "D": Letter("hidden size", lambda job, _: job.sizes.hidden_size),
    "h": Letter("query heads of a rank", lambda job, _: job.sizes.num_attention_heads // job.layout.tp),
    "g": Letter("key-value heads of a rank", lambda job, _: max(job.sizes.num_key_value_heads // job.layout.tp, 1)),
    "K": Letter("head size", lambda job, _: job.sizes.head_dim),
    "E": Letter("experts", lambda job, _: job.sizes.num_experts),
    "A": Letter("experts per token", lambda job, _: job.sizes.num_experts_per_tok),
    "e": Letter("experts that a rank computes", lambda job, _: max(job.expert_rows.num_experts, 1)),
    "f": Letter("their width on a rank", lambda job, _: job.expert_rows.width),
    "R": Letter("rows of a rank's experts", lambda job, _: job.expert_rows.buffer),
    "G": Letter("of these, those worked on at once", lambda job, _: job.expert_rows.at_once),
    "w": Letter("width of a dense layer on a rank", lambda job, _: job.sizes.intermediate_size // job.layout.tp),
    "v": Letter("vocabulary of a rank", lambda job, _: -(-job.sizes.vocab_size // job.layout.tp)),
    "c": Letter(
        "tokens whose logits exist at once", lambda job, _: min(-(-job.num_tokens // job.num_chunks), job.head_rows)
    ),
    "C": Letter("chunks of a transfer", lambda job, _: job.num_chunks),
    "C_experts": Letter("of tokens for the experts", lambda job, _: job.expert_rows.chunks),
    "L": Letter("layers with experts", lambda job, _: job.sizes.num_moe_layers),
    "b": Letter("bytes of a number", lambda job, _: job.element_bytes),
    "P": Letter("parameters of a rank of the group", lambda job, held: held.total),
    "P_attention": Letter("of a layer's attention", lambda _, held: held.attention),
    "P_experts": Letter("of a layer's experts", lambda _, held: held.experts),
    "P_dense": Letter("of a dense layer", lambda _, held: held.dense),
    "P_largest": Letter("of the largest tensor", lambda _, held: held.largest),
    "dp": Letter("data-parallel ranks", lambda job, _: job.layout.dp),
}


class Letters:
    """One rank's share of a micro-batch: the letters of LETTERS as attributes, and what decides which lines there are.

    values  of the letters; the attributes are `Term`s that know their names where `named`
    extra   4 where float32 copies of b=2 numbers are made, else 0
    gloo    a reduce-scatter on a CPU, which needs a second buffer and sums in float32
    keeps   gathered tokens wait for the backward
    static  buffers of the experts have the most rows that could come
    again   these are made again in the backward: see modeling/experts.py
    groups  in which these come, one after another
    joins   documents are attended to one by one, and their outputs joined
    """

    def __init__(self, job: Job, *, named: bool = False) -> None:
        held, tp = rank_parameters(job.sizes, job.layout), job.layout.tp
        self.values = {letter: found.of(job, held) for letter, found in LETTERS.items()}
        self.named, self.strategy, self.qk_norm = named, job.group_strategy, job.sizes.qk_norm
        self.extra = 4 if job.element_bytes < 4 else 0
        self.gloo, self.joins = job.device == "cpu", job.is_packed and job.device == "cpu"
        self.regather, self.keeps = job.execution.regather, tp > 1 and not job.execution.regather
        self.static, self.clips = job.static_rows, job.model.get("clip_qkv") is not None
        self.jitters = bool(job.model.get("router_jitter_noise"))
        self.groups, self.again = job.expert_rows.num_groups, job.multiplies_again
        for letter, value in self.values.items():
            setattr(self, letter, self.term(value, letter))

    def __getattr__(self, letter: str) -> float:
        """Tell type checkers that letters are numbers; other names are none."""
        raise AttributeError(letter)

    def term(self, number: float, name: str) -> float:
        """Return a number that knows this name where the letters do."""
        return Term(number, name) if self.named else number


class Line(NamedTuple):
    """Bytes of one rank that are alive at a moment; `kind` is a field of MemoryPlan."""

    what: str
    kind: str
    num_bytes: float


Lines = list[Line]


def attention_inputs(s: Letters) -> Lines:
    """Return what attention needs to the end of its backward."""
    residuals = Line("layer's input, and after attention", "activations", 2 * s.t * s.D * s.b)
    return [residuals, _tokens_kept(s, "attention")]


def attention_products(s: Letters) -> Lines:
    """Return what goes with the gradients of q, k and v."""
    lines = [
        Line("q, k and v", "activations", s.T * (s.h + 2 * s.g) * s.K * s.b),
        Line("attention's output", "activations", (1 + s.joins) * s.T * s.h * s.K * s.b),
        Line("log-sum-exps, norms' scales", "activations", 4 * (s.T * s.h + 2 * s.t)),
    ]
    if s.qk_norm == "head":
        lines.append(Line("q and k before their norms", "activations", s.T * (s.h + s.g) * (s.K * s.b + 4)))
    elif s.qk_norm == "full":
        lines.append(Line("q and k before and in their norms", "activations", 8 * s.T * (s.h + s.g) * s.K))
    if s.clips:
        lines.append(Line("q, k and v before clipping", "activations", s.T * (s.h + 2 * s.g) * s.K * s.b))
    return lines


def experts_kept(s: Letters) -> Lines:
    """Return what a forward of router and experts keeps."""
    lines = [
        Line("router's input", "activations", (4 if s.jitters else s.b) * s.t * s.D),
        Line("router's logits and scores", "activations", 8 * s.t * s.E),
        Line("router's choice and its weights", "activations", 20 * s.t * s.A),
    ]
    if s.jitters:
        lines.append(Line("noise on the router's input", "activations", 4 * s.t * s.D))
    if s.strategy == "all_to_all":
        lines += [
            Line("rows that came", "activations", s.R * s.D * s.b),
            Line("outputs that came back, plain and weighted", "activations", 8 * s.t * s.A * s.D),
            Line("their order and slots", "activations", 20 * s.R + 8 * s.t * s.A),
        ]
    else:
        gathers = s.strategy == "gather_tokens"
        if s.keeps and gathers:
            lines.append(_gathered(s, "tokens gathered for the experts"))
        elif s.extra and s.jitters:
            lines.append(Line("experts' input", "activations", s.t * s.D * s.b))
        slots = 12 if s.N > 1 and gathers else 8
        tokens = s.T if gathers else s.t
        lines.append(Line("slots and weights of tokens' choices", "activations", slots * tokens * s.A))
    if not s.again:
        lines.append(Line("gate and up products", "activations", 2 * s.R * s.f * s.b))
    return lines


def dense_kept(s: Letters) -> Lines:
    """Return what a dense layer's forward keeps: gate, up, silu(gate), and silu(gate) times up."""
    return [_tokens_kept(s, "the dense layer"), Line("its products", "activations", 4 * s.T * s.w * s.b)]


def _tokens_kept(s: Letters, where: str) -> Line:
    if s.keeps:
        return _gathered(s, f"tokens gathered for {where}")
    return Line(f"normed input of {where}", "activations", s.t * s.D * s.b)


def _gathered(s: Letters, what: str) -> Line:
    return Line(what, "gathered", s.T * s.D * s.b)


def _residual(s: Letters) -> Line:
    return Line("gradient of the residual", "activations", s.t * s.D * s.b)


def _sums_sent(s: Letters) -> Lines:
    """Return a rank's sums as they are scattered: what is sent, gloo's second buffer and float32 sums, the result."""
    if s.N == 1:
        return []
    lines = [Line("sums, as sent and as received", "activations", (s.T + s.t) * s.D * s.b)]
    if s.gloo:
        second = s.T * s.D * (s.b + s.extra) + s.extra * s.t * s.D
        lines.append(Line("gloo's second buffer of them", "activations", second))
    return lines


def _fullest(*stages: Lines) -> Lines:
    return max(stages, key=total)


def total(lines: Sequence[Line]) -> float:
    """Return the bytes of some lines together."""
    return math.fsum(line.num_bytes for line in lines)


def head_working(s: Letters) -> Lines:
    """Return what lives beside all layers' activations in the head: a slice's logits, or gradients that are sent."""
    logits = [
        Line("logits at a time, and their gradient", "logits", s.c * s.v * s.b),
        Line("gradients of gathered tokens", "logits", s.T * s.D * s.b / s.C),
    ]
    if s.extra:
        logits.append(Line("a slice's part of the head's gradient", "logits", s.v * s.D * s.b))
    lines = [
        Line("layers' output, plain and normed", "activations", 2 * s.t * s.D * s.b),
        Line("gradient of the head's input", "logits", s.t * s.D * s.b),
        Line("rotary tables, ids, targets", "activations", 32 * s.T),
        Line("the head's gradient in float32", "logits", 4 * s.v * s.D),
        *_fullest(logits, _sums_sent(s)),
    ]
    return [*lines, _gathered(s, "tokens for the head")] if s.N > 1 else lines


def attention_working(s: Letters) -> Lines:
    """Return all that a layer's attention has beside its inputs, at the fullest of its backward's parts."""
    heads = s.T * (s.h + 2 * s.g) * s.K * s.b
    products = attention_products(s)
    out_weights = Line("gradient of the output's weights", "gradients", s.P_attention * s.b * s.h / (2 * (s.h + s.g)))
    # With chunks in their order, each by rank, and all by rank.
    in_parts = 1 if s.C == 1 else 3
    of_output = [*products, Line("gradient of attention's output", "activations", in_parts * s.T * s.h * s.K * s.b)]
    scores = s.T * ((2 + s.joins) * s.h + 2 * s.g) * s.K * s.b
    of_scores = [*products, Line("gradients of output, q, k and v", "activations", scores), out_weights]
    of_norms = [Line("norms' gradients in float32", "activations", s.T * (20 * s.h + 8 * s.g) * s.K), out_weights]
    of_norms = of_norms if s.qk_norm == "full" else []  # others are one kernel
    of_inputs = [Line("gradients of q, k and v", "activations", heads)]
    if s.N == 1:
        of_inputs.append(Line("gradients of the input", "activations", 2 * s.t * s.D * s.b))
    else:
        of_output.append(_gathered(s, "gradients for attention"))
        of_inputs += [
            Line("the same in one tensor", "activations", heads),
            Line("attention's weights and their gradients", "gradients", 1.5 * s.P_attention * s.b),
            *_sums_sent(s),
        ]
        if s.regather:
            of_inputs.append(_gathered(s, "tokens for attention"))
    return [_residual(s), *_fullest(of_output, of_scores, of_norms, of_inputs)]


def dense_working(s: Letters) -> Lines:
    """Return what a dense layer's backward adds to its four products, at the fullest of its parts."""
    down = Line("gradient of the last weights", "gradients", s.P_dense * s.b / MATRICES)
    of_output = [Line("gradient of the product", "activations", (1 if s.C == 1 else 3) * s.T * s.w * s.b), down]
    of_product = [Line("gradients of the product and its factors", "activations", 2 * s.T * s.w * s.b), down]
    of_inputs = [Line("gradients of the weights", "gradients", s.P_dense * s.b)]
    if s.N == 1:
        of_inputs.append(Line("gradients of the input", "activations", 2 * s.t * s.D * s.b))
    else:
        of_output.append(_gathered(s, "gradients for the dense layer"))
        joined = Line("weights in one tensor", "gradients", 2 * s.P_dense * s.b / MATRICES)
        in_order = [Line("gradients by chunk, and in their order", "activations", 4 * s.T * s.w * s.b)]
        of_inputs = _fullest(in_order if s.C > 1 else [], [*of_inputs, joined, *_sums_sent(s)])
        if s.regather:
            of_inputs.append(_gathered(s, "tokens for the dense layer"))
    return [_residual(s), *_fullest(of_output, of_product, of_inputs)]


def experts_working(s: Letters) -> Lines:
    """Return what the experts' backward adds: while tokens' gradients are made or sent, or when the weights' are."""
    borrows, gathers = s.strategy == "gather_weights", s.strategy == "gather_tokens" and s.N > 1
    tokens = s.R if s.strategy == "all_to_all" else s.t if borrows else s.T
    pairs, at_once = 4 * (s.T * s.A + s.R), s.R if s.groups == 1 else s.G
    lines = [
        _residual(s),
        Line("gradient of the experts' input", "activations", s.t * s.D * s.b),
        Line("activations and gradients of all rows", "activations", 3 * at_once * s.f * s.b),
        Line("order of the rows", "activations", pairs if s.static else 16 * s.T * s.A + 8 * s.R),
    ]
    if borrows:
        lines.append(Line("all slices of the experts", "gathered", MATRICES * s.E * s.f * s.D * s.b))
    if gathers:
        lines.append(_gathered(s, "gradients for the experts"))
        if s.regather:
            lines.append(_gathered(s, "tokens for the experts"))
    # The loop holds the rows of one expert at a time, the grouped product those of all.
    if s.static:
        pieces = max(s.C_experts / s.groups, 1)
        rows, outputs = at_once / pieces, at_once * s.D * s.b
        of_outputs = [Line("gradients of outputs and activations", "activations", rows * (s.D + s.f) * s.b)]
        if s.again:
            of_outputs.append(Line("gate and up products, again", "activations", 2 * rows * s.f * s.b))
        of_inputs = [
            Line("gradients of rows, and their sums", "activations", (rows + tokens / s.C_experts) * s.D * s.b)
        ]
        of_rows = _fullest(of_outputs, of_inputs)
        if s.groups > 1:
            lines.append(Line("sums of the experts' gradients", "gradients", 4 * (s.N if borrows else 1) * s.P_experts))
    else:
        rows, outputs = s.R / s.e, s.R / s.e * s.D * (2 * s.b + 4)
        of_rows = [
            Line("sums of the tokens' gradients", "activations", 4 * tokens / s.C_experts * s.D),
            Line("rows of one expert", "activations", 4 * rows / s.C_experts * (3 * s.f + 2 * s.D)),
        ]
    of_weights = [
        Line("gradients of the experts", "gradients", (s.N if borrows else 1) * s.P_experts * s.b),
        Line("tokens or their gradients, by row" if s.static else "gradients of outputs", "activations", outputs),
    ]
    if s.static and s.groups < s.C_experts:
        of_weights += [
            Line("all rows by expert, not by chunk", "activations", 3 * at_once * s.f * s.b),
            Line("their order", "activations", pairs + 4 * s.T * s.A),
        ]
    sent = _sums_sent(s) if gathers else []
    if borrows:
        wide = s.extra if s.gloo else 0  # gloo sums in float32, from a second buffer
        whole = ((3 if s.gloo else 2) * s.b + wide) * s.N * s.P_experts
        sent = [Line("gradients of all slices, and as sent", "gradients", whole + (s.b + wide) * s.P_experts)]
    return [*lines, *_fullest(of_rows, sent, of_weights)]
