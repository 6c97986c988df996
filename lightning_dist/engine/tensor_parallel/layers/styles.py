"""The styles of layers in a tensor-parallel plan.

====================  ==================================================  =======================
style                 weight                                              output
====================  ==================================================  =======================
``colwise``           each rank has some output features; of a weight     the rank's own features
                      that stacks several matrices, such as a fused
                      query, key and value, some of each
``colwise_gather``    each rank has some output features                  gathered, on all ranks
``rowwise``           each rank has some input features                   summed, on all ranks
``rowwise_scatter``   each rank has some input features                   summed, a part of the
                                                                          sequence on each rank
``vocab``             each rank has some rows of an embedding             on all ranks
``sequence``          on all ranks                                        the rank's part of the
                                                                          sequence
``local``             on all ranks                                        the rank's own features
``replicate``         on all ranks                                        on all ranks
====================  ==================================================  =======================

``local`` is for modules with parameters between a ``colwise`` and a ``rowwise`` layer, such as a
norm of each head. Gradients of ``local`` and ``sequence`` modules are all-reduced.
"""

from __future__ import annotations

from enum import Enum


class Style(Enum):
    """A way to shard a layer; see the module's docstring."""

    COLWISE = "colwise"
    COLWISE_GATHER = "colwise_gather"
    ROWWISE = "rowwise"
    ROWWISE_SCATTER = "rowwise_scatter"
    VOCAB = "vocab"
    SEQUENCE = "sequence"
    LOCAL = "local"
    REPLICATE = "replicate"

    @property
    def takes_whole_input(self) -> bool:
        """Whether the layer computes some output features of the whole input."""
        return self in (Style.COLWISE, Style.COLWISE_GATHER)

    @property
    def sums_up(self) -> bool:
        """Whether the layer sums over the ranks' own features."""
        return self in (Style.ROWWISE, Style.ROWWISE_SCATTER)

    @property
    def cuts_a_matrix(self) -> bool:
        """Whether the layer's matrix is sharded by rows or columns."""
        return self.takes_whole_input or self.sums_up

    @property
    def needs_sequence_parallel(self) -> bool:
        """Whether the style requires a sharded sequence."""
        return self in (Style.SEQUENCE, Style.ROWWISE_SCATTER)
