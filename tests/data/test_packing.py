"""Packing keeps every token and every boundary; the held-out part is disjoint from the training part."""

from itertools import pairwise

import numpy as np
import pytest

from recipe.data.batches import evaluation_batches, stack_blocks
from recipe.data.packing import IGNORED, PackedBlocks, all_documents, hold_out
from tests.data_samples import all_tokens, numbered_blocks


def packed(lengths: list[int], *, block_size: int) -> PackedBlocks:
    """Documents of these lengths over the tokens 0, 1, 2, ..."""
    ends = np.cumsum(lengths)
    return PackedBlocks(np.arange(ends[-1], dtype=np.uint16), stretches=all_documents(ends), block_size=block_size)


def test_blocks_hold_the_stream_and_mark_every_boundary() -> None:
    blocks = packed([3, 5, 6], block_size=4)  # documents start at 0, 3 and 8; the last partial block is dropped
    assert (len(blocks), blocks.num_tokens, blocks.num_unused_tokens, blocks.num_documents) == (3, 14, 2, 3)
    assert all_tokens(blocks) == list(range(12))
    assert [block.document_starts for block in (blocks[0], blocks[1], blocks[2])] == [(0, 3), (0,), (0,)]
    assert blocks[0].labels.tolist() == [IGNORED, 1, 2, IGNORED]
    assert blocks[1].labels.tolist() == [IGNORED, 5, 6, 7]
    assert blocks[0].labels.dtype == blocks[0].input_ids.dtype == np.int64
    many = packed([1, 1, 2, 1, 9], block_size=8)[0]
    assert many.document_starts == (0, 1, 2, 4, 5)
    assert many.labels.tolist() == [IGNORED, IGNORED, IGNORED, 3, IGNORED, IGNORED, 6, 7]
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"block {index} of 3"):
            blocks[index]


def test_packing_equals_plain_concatenation_for_random_parts() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 60000, 2000).astype(np.uint16)
    ends = np.unique(generator.integers(1, 2000, 150))
    documents = all_documents(ends)
    chosen = generator.random(len(ends)) < 0.5
    stretches = type(documents)(documents.starts[chosen], documents.ends[chosen])
    want = np.concatenate([tokens[a:b] for a, b in zip(*stretches, strict=True)])
    starts = set(np.cumsum(stretches.ends - stretches.starts).tolist()) | {0}
    blocks = PackedBlocks(tokens, stretches=stretches, block_size=7)
    assert all_tokens(blocks) == want[: len(blocks) * 7].tolist()
    for index in range(len(blocks)):
        inside = {start - index * 7 for start in starts if index * 7 < start < (index + 1) * 7}
        assert blocks[index].document_starts == tuple(sorted({0} | inside))


def test_whole_documents_for_random_lengths() -> None:
    generator = np.random.default_rng(1)
    ends = np.cumsum(generator.integers(1, 30, 200))
    blocks = PackedBlocks(np.arange(ends[-1]) + 1, stretches=all_documents(ends), block_size=16, whole=True)
    rows = [blocks[index] for index in range(len(blocks))]
    assert [token for row in rows for token in row.input_ids[: row.num_tokens].tolist()] == list(range(1, ends[-1] + 1))
    for row in rows:
        assert (row.input_ids[row.num_tokens :] == 0).all()
        assert (row.labels[row.num_tokens :] == IGNORED).all()
        assert row.num_tokens in (16, row.document_starts[-1])
    assert len(blocks) * 16 == blocks.num_tokens + blocks.num_padding_tokens
    in_blocks = [set(row.input_ids[: row.num_tokens].tolist()) for row in rows]
    for start, end in zip(all_documents(ends).starts + 1, ends + 1, strict=True):
        num_blocks = sum(not tokens.isdisjoint(range(start, end)) for tokens in in_blocks)
        assert num_blocks == -(-(end - start) // 16)
    # A document starts a new block only where it does not fit in what is left.
    for row, following in pairwise(rows):
        if row.num_tokens < 16:
            first_length = [*following.document_starts, 16][1]
            assert row.num_tokens + first_length > 16
    for limit in (1, 7, len(blocks)):
        first = blocks.first(limit)
        assert len(first) == limit
        for index in range(limit):
            assert [part.tolist() for part in first[index][:2]] == [part.tolist() for part in rows[index][:2]]


def test_padding_inside_sequences_is_masked_and_not_counted() -> None:
    ends = np.cumsum([5, 6, 8])
    blocks = PackedBlocks(np.arange(19), stretches=all_documents(ends), block_size=8, whole=True)
    (batch,) = evaluation_batches(blocks, num_sequences=4, dp=1, dp_rank=0)
    assert batch.token_mask is not None
    assert batch.token_mask.sum(dim=1).tolist() == [5, 6, 8, 0]
    assert batch.token_mask[0].tolist() == [True] * 5 + [False] * 3
    assert (batch.num_tokens, batch.squared_lengths, batch.num_targets) == (19, 25 + 36 + 64, 4 + 5 + 7)
    full = stack_blocks([blocks[2]], positions=[2], num_sequences=1, block_size=8)
    assert (full.token_mask, full.num_tokens, full.squared_lengths) == (None, 8, 64)
    unread = full._replace(input_ids=full.input_ids.to("meta"), labels=full.labels.to("meta"))
    assert (unread.num_tokens, unread.squared_lengths) == (8, 64)  # of their shapes alone, whatever the tokens


def test_held_out_documents_are_spread_and_few_documents_are_cut_by_tokens_instead() -> None:
    train, validation, rule = hold_out(np.arange(1, 101, dtype=np.int64) * 10, percentage=5)
    assert (validation.starts // 10).tolist() == [19, 39, 59, 79, 99]
    assert sorted([*train.starts.tolist(), *validation.starts.tolist()]) == list(range(0, 1000, 10))
    assert rule == "5 of 100 documents are held out, at even distances"
    train, validation, rule = hold_out(np.array([600, 1000], dtype=np.int64), percentage=10)
    assert (train.starts.tolist(), train.ends.tolist()) == ([0, 600], [600, 900])
    assert (validation.starts.tolist(), validation.ends.tolist()) == ([900], [1000])
    assert rule == (
        "the last 100 of 1000 tokens are held out, because 2 documents are too few to hold out 10 % of them"
    )


def test_nothing_is_held_out_at_zero_percent_and_evaluates_to_no_batches() -> None:
    train, none, _ = hold_out(np.array([4, 8], dtype=np.int64), percentage=0)
    assert (len(train.starts), len(none.starts)) == (2, 0)
    blocks = PackedBlocks(np.arange(8), stretches=none, block_size=4)
    assert list(evaluation_batches(blocks, num_sequences=2, dp=1, dp_rank=0)) == []


@pytest.mark.parametrize(("dp", "num_sequences"), [(1, 3), (2, 3), (3, 1), (4, 4)])
def test_evaluation_sees_every_block_once_and_equally_often_on_every_rank(dp: int, num_sequences: int) -> None:
    blocks = numbered_blocks(10)
    by_rank = [list(evaluation_batches(blocks, num_sequences=num_sequences, dp=dp, dp_rank=rank)) for rank in range(dp)]
    assert len({len(batches) for batches in by_rank}) == 1
    seen = [place for batches in by_rank for batch in batches for place in batch.positions if place >= 0]
    assert sorted(seen) == list(range(10))
    assert sum(batch.num_targets for batches in by_rank for batch in batches) == 10 * 3
    for batches in by_rank:
        for batch in batches:
            assert batch.input_ids.shape == batch.labels.shape == (num_sequences, 4)
            assert (batch.token_mask is None) == (-1 not in batch.positions)
            for row, place in enumerate(batch.positions):
                assert batch.document_starts[row] == (0,)
                if place < 0:
                    assert batch.token_mask is not None
                    assert not batch.token_mask[row].any()
                    assert (batch.labels[row] == IGNORED).all()
                else:
                    assert batch.input_ids[row].tolist() == [place] * 4
                    assert batch.token_mask is None or batch.token_mask[row].all()
