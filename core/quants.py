"""Contract of the kind `quant`: what keeps a model's matrices, and multiplies by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .linear import Linear


class Quant(Protocol):
    """Kind `quant`. How a model's matrices are kept, and multiplied. Activations and KV stay in the model's dtype.

    Models with the capability `quant` in their spec find it in their context, as `extras["quant"]`; others are refused
    beside any quant but `none`.

    `weight_bits`, where the class has it, is about what one weight takes; `phloem doctor` asks whether a model fits.
    """

    blocks: frozenset[str]  # names of stored blocks that it runs as they are, such as `Q4_K`; others come as floats

    def linear(self, linear: Linear) -> Linear:
        """What takes the place of a linear map. Called once per matrix while a model loads, before the next is read.

        Its weight, float [out, in] in the model's dtype on its device, or `Blocks` of the kinds in `blocks`, is not to
        be kept, so that memory holds the quantised model and one matrix. Bias and norms may be filled later: they are
        to be kept, and not read yet.

        A row of the result must not depend on the other rows of a call, on their number, nor on the number of threads:
        a text gives the same tokens in chunks, in company, and as a draft.
        """
