"""Grouped products of fake tensors: results of the right shape, in any type, without a kernel that would know it."""

from torch import Tensor


class ShapeProducts:
    """Stands in for a backend's products (modeling/experts_grouped.py); results hold nothing."""

    def forward(self, x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        return x_RI.new_empty(x_RI.shape[0], weight_eOI.shape[1])

    def back(self, grad_RO: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        return grad_RO.new_empty(grad_RO.shape[0], weight_eOI.shape[2])

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor) -> Tensor:
        return x_RI.new_empty(offsets_e.shape[0], grad_RO.shape[1], x_RI.shape[1])
