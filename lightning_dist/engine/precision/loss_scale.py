"""How much a loss is scaled, so that small gradients do not vanish in 16 bits.

fp16 has no numbers below 6e-8, and many gradients are smaller. They are linear in the loss, so a
loss that is 2**16 times as large gives gradients that are, and the optimizer gets them divided by
as much (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2). The largest scale
at which nothing becomes infinite is found by trying: a step whose gradients are not finite is left
out and the scale goes down, and it goes up when all went well for long. The numbers are those of
``torch.amp.GradScaler``, which looks at one process only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

_LEAST = 2.0**-24


@dataclass(slots=True)
class LossScale:
    """A loss scale and what became of the steps so far.

    Attributes:
        value: The scale.
        is_dynamic: Whether it follows what the steps find.
        growth_factor: What it is multiplied by after ``growth_interval`` good steps in a row.
        backoff_factor: What it is multiplied by after a step that was left out.
        growth_interval: Good steps in a row.
        num_good: Such steps since the last change.
        num_steps: All steps, those that were left out too.
        num_skipped: Steps that were left out.
    """

    value: float = 2.0**16
    is_dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    num_good: int = 0
    num_steps: int = 0
    num_skipped: int = 0

    def end_step(self, *, overflowed: bool) -> None:
        """Notes what a step has found.

        Args:
            overflowed: Whether its gradients were not finite, so that it was left out.
        """
        self.num_steps += 1
        self.num_skipped += overflowed
        self.num_good = 0 if overflowed else self.num_good + 1
        if not self.is_dynamic:
            return
        if overflowed:
            self.value = max(_LEAST, self.value * self.backoff_factor)
        elif self.num_good == self.growth_interval:
            self.value *= self.growth_factor
            self.num_good = 0

    def state_dict(self) -> dict[str, float]:
        """Gives what a resumed run needs."""
        state = asdict(self)
        return {name: state[name] for name in ("value", "num_good", "num_steps", "num_skipped")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where another run has ended; a scale that is fixed stays what it is.

        Args:
            state: What :meth:`state_dict` gave.
        """
        if self.is_dynamic:
            self.value = float(state["value"])
        self.num_good = int(state["num_good"])
        self.num_steps = int(state["num_steps"])
        self.num_skipped = int(state["num_skipped"])
