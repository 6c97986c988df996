"""Train a recipe from a configuration file.

.. code-block:: bash

    python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml
    python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml --print_config
    python -m recipes.train fit --trainer.strategy.help lightning_dist.PipelineStrategy
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

import lightning_dist  # noqa: F401  (registers the strategies' names)
from recipes.gpt import GPT
from recipes.text import TextDataModule


def main() -> None:
    """Runs the command line."""
    LightningCLI(
        GPT,
        TextDataModule,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
    )


if __name__ == "__main__":
    main()
