"""Keep the copies of a parameter equal that several ranks of a pipeline hold.

Copies that begin equal stay equal if each optimizer gets the same bits: the sum of all stages'
gradients. The rank of the first stage with the parameter sums, runs the parameter's hooks on the
sum, and sends the sum to the others. Under ``pipedream_2bw`` later stages have a batch's gradients
earlier, so these arrive before the first stage has its own, and the sum comes back while the later
stages run the next batch. Clipping has the sum when a rank posts its norm.

On a mesh, ranks in the same place of two stages have the same shard, and exchange its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.links import ChannelEnds
from lightning_dist.engine.pipeline.gradients import EarlierGradients
from lightning_dist.engine.splitting.ties import Tie
from lightning_dist.engine.tensors.dtensor import from_shard, local_part
from lightning_dist.engine.tensors.patch import add_gradient


class TiedSums:
    """Sums gradients over the copies of a parameter; each rank of a pipeline has a ``TiedSums``.

    Args:
        ties: All ties of the pipeline.
        rank_of_stage: The rank of each stage.
        rank: This rank's index in the pipeline.
        links: This rank's channels.
        change: Called on the summing rank with a parameter's name and its sum; returns the
            gradient to use instead.

    Attributes:
        names: Names of the copies on this rank, in the pipelined module.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        rank_of_stage: Sequence[int],
        rank: int,
        links: ChannelEnds[int],
        change: Callable[[str, Tensor], Tensor | None] = lambda _, gradient: gradient,
    ) -> None:
        self._change = change
        self._links = links
        self._elsewhere: dict[int, list[str]] = {}  # by the rank that sums
        self._here: dict[int, list[str]] = {}  # by the other ranks, if this one sums
        names = []
        for tie in ties:
            adder, *others = tie.ranks(rank_of_stage)
            if rank not in (adder, *others) or not others:
                continue
            names.append(name := tie.name_on(rank, rank_of_stage))
            if adder != rank:
                self._elsewhere.setdefault(adder, []).append(name)
            for peer in others if adder == rank else ():
                self._here.setdefault(peer, []).append(name)
        self.names = frozenset(names)
        self._sums: dict[int, dict[str, Tensor | None]] = {}
        self._earlier = EarlierGradients()

    @property
    def sent(self) -> dict[int, list[str]]:
        """Names of the copies whose gradients an update sends to each other rank."""
        return {**self._elsewhere, **self._here}

    def counts(self, name: str) -> bool:
        """Returns whether this rank counts a parameter in the norm of the whole gradient."""
        return all(name not in names for names in self._elsewhere.values())

    @torch.no_grad()
    def share(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sets all copies to the same values, frozen ones too. Collective: all ranks must call."""
        for peer, names in self._here.items():
            copies = [local_part(parameters[name].detach()).clone() for name in names]
            self._links.outgoing[peer].send(copies)
        for peer, names in self._elsewhere.items():
            received = self._links.incoming[peer].receive()
            for name, values in zip(names, received, strict=True):
                local_part(parameters[name]).copy_(values)

    def set_apart(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes away what an earlier update has left in ``p.grad``: sums that each copy has.

        Call it before each batch's gradients are installed, and :meth:`keep` behind those of a
        batch that more follow before the update. It does nothing where gradients are cleared after
        each update.
        """
        self._earlier.set_apart(self._own(parameters))

    def keep(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Restores earlier gradients of parameters that the batch did not use.

        Call it if more batches follow before the update.
        """
        self._earlier.keep(self._own(parameters))

    def _own(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        return [parameters[name] for name in self.names & parameters.keys()]

    @torch.no_grad()
    def post(
        self, update: int, gradients: Mapping[str, Tensor], trained: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Sends and sums the gradients of an update; only the summing rank waits.

        Args:
            update: Index of the update; :meth:`install` must follow for each update.
            gradients: This rank's complete gradients, by name; of a sharded one the local shard.
                The copies' gradients belong to this object afterwards.
            trained: Names of this rank's trainable parameters, compared over the copies. None
                where ranks are at different batches, between which users may freeze parameters.

        Returns:
            The gradients that this rank counts, sums among them.

        Raises:
            ValueError: A copy is frozen, and another is trained.
        """
        for peer, names in self._elsewhere.items():
            values = [gradients.get(name) for name in names]
            flags = None if trained is None else [name in trained for name in names]
            self._links.outgoing[peer].send((values, flags))
        sums = self._add_up(gradients, trained)
        for peer, names in self._here.items():
            self._links.outgoing[peer].send([sums[name] for name in names])
        # Clipping writes to the installed gradients, perhaps before the sums have been sent.
        self._sums[update] = {n: None if g is None else g.clone() for n, g in sums.items()}
        known = {n: g for n, g in {**gradients, **sums}.items() if g is not None}
        return {name: gradient for name, gradient in known.items() if self.counts(name)}

    @torch.no_grad()
    def install(self, update: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replaces ``p.grad`` with the sums, and waits for those that have not arrived.

        What was set apart is added to them.
        """
        sums = self._sums.pop(update, {})
        for peer, names in self._elsewhere.items():
            received = self._links.incoming[peer].receive()
            sums.update(zip(names, received, strict=True))
        for name, total in sums.items():
            if name in parameters:
                parameters[name].grad = _as_gradient_of(parameters[name], total)
        self._earlier.add()

    def _add_up(
        self, gradients: Mapping[str, Tensor], trained: Collection[str] | None
    ) -> dict[str, Tensor | None]:
        sums: dict[str, Tensor | None] = {}
        for peer, names in self._here.items():
            parts, flags = self._links.incoming[peer].receive()
            _check_alike(names, trained, flags)
            for name, part in zip(names, parts, strict=True):
                total = sums.get(name, gradients.get(name))
                if total is not None and part is not None:
                    total = add_gradient(part, total)
                sums[name] = part if total is None else total
        return {n: None if g is None else self._change(n, g) for n, g in sums.items()}


def _check_alike(
    names: Sequence[str], trained: Collection[str] | None, others: Sequence[bool] | None
) -> None:
    if trained is None or others is None:
        return
    pairs = zip(names, others, strict=True)
    different = [name for name, there in pairs if (name in trained) != there]
    if different:
        raise ValueError(
            f"Stages share the parameters {different}, which are frozen on some ranks and trained"
            " on others. Call `requires_grad_` on all ranks: on a layer that has them, or on"
            " `self.parameters()`; parameters of a slice of layers are this rank's only."
        )


def _as_gradient_of(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    own = local_part(parameter.detach())
    # So that each copy's optimizer gets the same strides, and computes the same bits.
    if not gradient.is_sparse and gradient.stride() != own.stride():
        gradient = torch.empty_like(own).copy_(gradient)
    return from_shard(gradient, parameter)
