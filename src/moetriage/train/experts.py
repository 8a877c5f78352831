"""The experts of an MoE layer: stacked weights, and three ways to run them on rows that lie ordered by expert.

In: rows in equal buffers (``padded``, one bmm a matrix), or one behind the other (``grouped``, grouped GEMMs; ``expert_loop`` has the one
for CPUs). Out: rows. Knows neither tokens nor gates.

Legend: E experts, C rows per expert, M rows of all experts together, D model width, H expert width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from moetriage.train.dispatch import with_zero_row

Activation = Literal["gelu", "swiglu"]


def activate(pre: list[Tensor], activation: Activation) -> Tensor:
    """Return the hidden values: gelu(up), or silu(gate) * up; ``pre`` holds (gate, up) or (up,)."""
    return F.gelu(pre[0]) if activation == "gelu" else F.silu(pre[0]) * pre[1]


class Experts(nn.Module):
    """Hold E feed-forward networks; matrices are (E, in, out), named like Hugging Face's where those exist."""

    gate_proj: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, num_experts: int, d_model: int, d_expert: int, activation: Activation = "swiglu", *, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.activation: Activation = activation
        swiglu = activation == "swiglu"
        self.register_parameter("gate_proj", nn.Parameter(torch.empty(num_experts, d_model, d_expert)) if swiglu else None)
        self.up_proj = nn.Parameter(torch.empty(num_experts, d_model, d_expert))
        self.down_proj = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.register_parameter("up_bias", nn.Parameter(torch.empty(num_experts, d_expert)) if bias else None)
        self.register_parameter("down_bias", nn.Parameter(torch.empty(num_experts, d_model)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each matrix as nn.Linear does, uniform within 1 / sqrt(its inputs); biases are 0."""
        for weight in (*self.inputs(), self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def inputs(self) -> list[Tensor]:
        """Return the matrices that read the input: (gate, up) or (up,)."""
        return [self.up_proj] if self.gate_proj is None else [self.gate_proj, self.up_proj]

    def padded(self, x_ECD: Tensor) -> Tensor:
        """Run each expert on its buffer of C rows; returns (E, C, D)."""
        if self.up_bias is None or self.down_bias is None:
            return torch.bmm(activate([torch.bmm(x_ECD, weight) for weight in self.inputs()], self.activation), self.down_proj)
        pre = [torch.baddbmm(self.up_bias[:, None], x_ECD, weight) for weight in self.inputs()]
        return torch.baddbmm(self.down_bias[:, None], activate(pre, self.activation), self.down_proj)

    def grouped(self, x_MD: Tensor, rows_E: Tensor) -> Tensor:
        """Run expert e on the next rows_E[e] rows; what is returned for rows beyond them all is undefined. Rows are float32 or 16-bit."""
        offsets_E = rows_E.cumsum(0).to(torch.int32)
        # grouped_mm is not under autocast's control.
        pre = [F.grouped_mm(x_MD, weight.to(x_MD.dtype), offs=offsets_E) for weight in self.inputs()]
        if self.up_bias is None or self.down_bias is None:
            return F.grouped_mm(activate(pre, self.activation), self.down_proj.to(x_MD.dtype), offs=offsets_E)
        # Rows beyond the last expert take a bias of their own: what their undefined values send back must reach no real one.
        rows_M = torch.arange(len(x_MD), device=x_MD.device, dtype=torch.int32)
        expert_M = torch.searchsorted(offsets_E, rows_M, right=True)
        up_bias_MH, down_bias_MD = (with_zero_row(bias.to(x_MD.dtype))[expert_M] for bias in (self.up_bias, self.down_bias))
        hidden_MH = activate([values_MH + up_bias_MH for values_MH in pre], self.activation)
        return F.grouped_mm(hidden_MH, self.down_proj.to(x_MD.dtype), offs=offsets_E) + down_bias_MD
