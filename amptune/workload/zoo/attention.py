"""Multi-head self-attention (Vaswani et al., 2017, arXiv:1706.03762), shared by BERT and GPT-2."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Self-attention from (batch, tokens, width) to the same shape; one projection gives query, key and value."""

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        joint: Tensor = self.query_key_value(x)
        query, key, value = (
            joint.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output
