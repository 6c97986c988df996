"""Two replicas in one process that step by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from tests.helpers.networks.models import Classifier, make_module, make_optimizer, share_of


def local_steps(num_samples: int, warmup: int) -> Iterator[tuple[int, list[Classifier]]]:
    """Yields the number of each step and the replicas behind it.

    Args:
        num_samples: Of both replicas together.
        warmup: Steps with averaged gradients.
    """
    modules = [make_module() for _ in range(2)]
    optimizers = [make_optimizer("sgd", m.parameters()) for m in modules]
    shares = [share_of(replica, num_samples) for replica in range(2)]
    for step, batches in enumerate(zip(*shares, strict=True)):
        for module, (x, y) in zip(modules, batches, strict=True):
            module.zero_grad()
            F.cross_entropy(module.model(x), y).backward()
        if step < warmup:
            for same in zip(*(m.parameters() for m in modules), strict=True):
                mean = sum(p.grad for p in same) / 2
                for parameter in same:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        yield step, modules
