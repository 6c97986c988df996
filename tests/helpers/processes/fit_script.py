"""A user's training script, run by the tests in real processes."""

from __future__ import annotations

import gc


def main() -> None:
    gc.disable()  # imports make no garbage, and looking for it takes a third of their time
    from tests.helpers.processes.troubled_fit import run

    gc.freeze()  # the tests time how a run ends, not how Python frees what was imported
    gc.enable()
    run()


if __name__ == "__main__":
    main()
