"""Send and receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmcomm.collectives.arguments import check_rank, check_tensor
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from symmcomm.communicator import Communicator


def _check(self: Communicator, tensor: torch.Tensor, peer: int, name: str) -> None:
    check_tensor(tensor, "tensor")
    check_rank(self, peer, name)
    if peer == self.rank:
        raise ArgumentError(f"{name}={peer} is the calling rank itself")


def send(self: Communicator, tensor: torch.Tensor, dst: int) -> None:
    """Sends ``tensor`` to rank ``dst``. Messages of a pair arrive in the order sent; small ones return before they are
    received. Where the receiver expected another dtype or element count, both ranks get MismatchError, the sender in
    this or its next ``send`` to that rank."""
    _check(self, tensor, dst, "dst")
    call = encode(Kind.send, tensor.dtype)
    status = self.kernels.send(self.ctx, call, tensor.data_ptr(), tensor.nbytes, dst)
    if status:
        self.fail(status)


def recv(self: Communicator, tensor: torch.Tensor, src: int) -> None:
    """Receives rank ``src``'s next message into ``tensor``, of the dtype and element count that was sent."""
    _check(self, tensor, src, "src")
    call = encode(Kind.send, tensor.dtype)
    status = self.kernels.receive(self.ctx, call, tensor.data_ptr(), tensor.nbytes, src)
    if status:
        self.fail(status)
