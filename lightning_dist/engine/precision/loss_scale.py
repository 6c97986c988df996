"""How much a loss is scaled, so that small gradients do not vanish in 16 bits.

fp16 has no numbers below 6e-8, and many gradients are smaller. Gradients are linear in the loss, so
a loss that is 2**16 times as large has gradients that are 2**16 times as large. The optimizer gets
them divided by the scale (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).
The largest scale without an overflow is found by trying: a step whose gradients are not finite is
skipped and the scale goes down. After many good steps the scale goes up. The constants are those of
``torch.amp.GradScaler``, which looks at one process only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

_LEAST = 2.0**-24
_GROWTH, _BACKOFF = 2.0, 0.5


@dataclass(slots=True)
class LossScale:
    """A loss scale and the counts of the steps so far.

    Attributes:
        value: The scale.
        is_dynamic: Whether the scale changes with the steps' overflows.
        growth_interval: Good steps in a row before the scale grows.
        num_good: Good steps since the last change of the scale or skipped step.
        num_steps: All steps, skipped ones too.
        num_skipped: Skipped steps.
    """

    value: float = 2.0**16
    is_dynamic: bool = True
    growth_interval: int = 2000
    num_good: int = 0
    num_steps: int = 0
    num_skipped: int = 0

    def end_step(self, *, overflowed: bool) -> None:
        """Counts a step, skipped if gradients overflowed, and changes the scale."""
        self.num_steps += 1
        self.num_skipped += overflowed
        self.num_good = 0 if overflowed else self.num_good + 1
        if not self.is_dynamic:
            return
        if overflowed:
            self.value = max(_LEAST, self.value * _BACKOFF)
        elif self.num_good == self.growth_interval:
            self.value *= _GROWTH
            self.num_good = 0

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a resumed run needs."""
        state = asdict(self)
        return {name: state[name] for name in ("value", "num_good", "num_steps", "num_skipped")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the state that :meth:`state_dict` returned; a fixed scale keeps its value."""
        if self.is_dynamic:
            self.value = float(state["value"])
        self.num_good = int(state["num_good"])
        self.num_steps = int(state["num_steps"])
        self.num_skipped = int(state["num_skipped"])
