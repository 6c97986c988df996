"""Say in the user's words what torch says of tensors that are spread and others that are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_TORCH_SAYS = "got mixed torch.Tensor and DTensor"


@contextmanager
def explained_mixture() -> Iterator[None]:
    """Explains why a step cannot compute with parameters as it does on a single device.

    Yields:
        Nothing.

    Raises:
        ValueError: It has done so.
    """
    try:
        yield
    except RuntimeError as error:
        if _TORCH_SAYS not in str(error):
            raise
        raise ValueError(
            "A step has computed with a parameter itself beside other tensors, a penalty on weights"
            " for instance, and each rank has a part of it only. Use the optimizer's weight_decay"
            " for that, or compute it inside of the layer that has the parameter."
            f" ({str(error).splitlines()[0]})"
        ) from error
