"""Train a recipe from a configuration file.

.. code-block:: bash

    python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml
    python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml --print_config
    python -m recipes.train fit --trainer.strategy.help lightning_dist.PipelineStrategy
    python -m recipes.train fit --model.help recipes.gpt.GPT

``validate``, ``test`` and ``predict`` take the same files, and ``--ckpt_path``. A configuration
names its model and data by ``class_path``; one that names none means the GPT and its text.
"""

from __future__ import annotations

import gc


def main() -> None:
    """Runs the command line."""
    # Imports make half a million objects and no garbage; looking for it takes a third of their
    # time, in each process. Nor need the collector look through them when the process ends.
    gc.disable()
    from recipes.command_line import run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
