"""The attention of useful models against the same sum written out."""

from __future__ import annotations

import pytest
import torch

from rayhicache.engines.attention import grouped_attention

WIDTH, SCALE = 16, 0.25


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * SCALE + mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("rows", "queries", "keys"), [(1, 1, 1), (1, 1, 9), (3, 1, 9), (1, 5, 9), (3, 5, 9), (2, 9, 9)]
)
def test_grouped_attention_is_attention(rows: int, queries: int, keys: int, kv_heads: int) -> None:
    dice = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 6, queries, WIDTH, generator=dice)
    # As the pools give them: tokens before heads in memory.
    key, value = (
        torch.randn(rows, keys, kv_heads, WIDTH, generator=dice).transpose(1, 2) for _ in range(2)
    )
    hidden = torch.arange(keys)[None, :] > torch.arange(keys - queries, keys)[:, None]
    least = torch.finfo(torch.float32).min
    mask = torch.zeros(rows, 1, queries, keys).masked_fill(hidden, least)
    module = torch.nn.Module()
    causal, _ = grouped_attention(module, query, key, value, None, SCALE)
    masked, _ = grouped_attention(module, query, key, value, mask, SCALE)
    expected = written_out(query, key, value, mask)
    torch.testing.assert_close(causal, expected)
    torch.testing.assert_close(masked, expected)


def test_a_mask_hides_what_a_shorter_row_does_not_have() -> None:
    dice = torch.Generator().manual_seed(1)
    query = torch.randn(2, 6, 1, WIDTH, generator=dice)
    key, value = (torch.randn(2, 2, 9, WIDTH, generator=dice) for _ in range(2))
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, :, :, 4:] = torch.finfo(torch.float32).min
    module = torch.nn.Module()
    together, _ = grouped_attention(module, query, key, value, mask, SCALE)
    alone, _ = grouped_attention(module, query[1:], key[1:, :, :4], value[1:, :, :4], None, SCALE)
    torch.testing.assert_close(together[1:], alone)
