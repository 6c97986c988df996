"""Search good options of a recipe: learning rate, schedule, micro-batches; quality beside speed.

.. code-block:: bash

    pip install 'lightning-dist[tune]'
    torchrun --nproc-per-node=2 -m recipes.tune --config recipes/configs/tune_gpt.yaml
    torchrun --nproc-per-node=2 -m recipes.tune --config recipes/configs/tune_gpt.yaml --trials=40

The second command goes on where the first one has ended, or was interrupted. The first rank owns
the study. Each trial is a training of its own on all ranks (:mod:`recipes.tuning.ranks`), so it may
fail, or be killed for its memory, and the study goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from recipes.tuning.definition import Parameter, Tuning
from recipes.tuning.ranks import Ranks

if TYPE_CHECKING:
    from recipes.tuning.study import StudyOwner


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line of this rank.

    Args:
        arguments: Words of the command line; None takes those of the process.
    """
    try:
        tuning = parse(arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if find_spec("optuna") is None:
        sys.exit("Tuning needs optuna: pip install 'lightning-dist[tune]'")
    ranks = Ranks()
    try:
        tune(tuning, ranks)
    except ValueError as error:
        if ranks.is_first:  # at once: a launcher that sees another rank's end may end this one
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        ranks.close()


def tune(tuning: Tuning, ranks: Ranks) -> None:
    """Runs trials until the budget is used up. Collective.

    Args:
        tuning: The search.
        ranks: All ranks of this run.

    Raises:
        ValueError: The study is of something else, or too many trials have failed in a row.
    """
    owners: list[StudyOwner] = []  # one on the first rank, none elsewhere

    def own() -> None:
        from recipes.tuning.study import StudyOwner

        owners.append(StudyOwner(tuning))

    ranks.decide(own)
    objectives = tuple(tuning.objectives)
    try:
        while (order := ranks.decide(lambda: owners[0].ask())) is not None:
            outcome = ranks.train(
                order, objectives, tuning.skipped_batches, lambda report: owners[0].report(report)
            )
            for owner in owners:
                owner.tell(outcome)
    finally:
        for owner in owners:
            from recipes.tuning.report import report

            report(owner.study, tuning)
            owner.close()


def parse(arguments: Sequence[str] | None = None) -> Tuning:
    """Reads the command line and the configuration.

    Args:
        arguments: Words of the command line; None takes those of the process.
    """
    parser = ArgumentParser(prog="python -m recipes.tune", description=__doc__)
    parser.add_argument("--config", action="config", help="a file such as tune_gpt.yaml")
    parser.add_class_arguments(Tuning, as_group=False)
    parsed = parser.parse_args(arguments).as_dict()
    space = {name: Parameter(**entries) for name, entries in parsed["space"].items()}
    own = {f.name: parsed[f.name] for f in fields(Tuning) if f.name != "recipe"}
    return Tuning(**{**own, "space": space})


if __name__ == "__main__":
    main()
