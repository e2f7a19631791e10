"""Attention for models of useful size: grouped heads by the kernels that PyTorch ships.

Nothing of a mask's size is made where rows are alike, and keys and values aren't repeated for
the query heads of a group unless a masked chunk needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    import torch

GROUPED = "rayhicache_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers, for inference.

    Args:
        query: `dtype[rows, heads, queries, width]`.
        key, value: `dtype[rows, kv heads, keys, width]`; whole groups of heads share one.
        attention_mask: added to the scores, `dtype[rows, 1, queries, keys]`; None where each
            row's queries are its last tokens and see what lies before them.

    Returns:
        `dtype[rows, queries, heads, width]`, and no weights.
    """
    heads, queries, groups = query.shape[1], query.shape[2], key.shape[1]
    if attention_mask is None:
        bias = causal_lower_right(queries, key.shape[2])
        # A kernel that is causal from the lower right reads the groups as they are.
        found = scaled_dot_product_attention(
            query, key, value, bias, scale=scaling, enable_gqa=heads != groups
        )
    elif queries == 1:
        # The heads of a group are as many queries of one head.
        folded = query.reshape(query.shape[0], groups, heads // groups, query.shape[3])
        found = scaled_dot_product_attention(
            folded, key, value, attention_mask, scale=scaling
        ).reshape(query.shape[:3] + value.shape[3:])
    else:
        key = key.repeat_interleave(heads // groups, dim=1)
        value = value.repeat_interleave(heads // groups, dim=1)
        found = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
