"""Sources that several calls read."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Fixed"]


class Fixed(list[Tensor]):
    """Flat sources that stay as they are: the kernels' table of their addresses, `bank`, is made once and kept."""

    bank = None
