"""Train a recipe from a configuration file.

.. code-block:: bash

    python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml
    python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml --print_config
    python -m recipes.train fit --trainer.strategy.help lightning_dist.PipelineStrategy

``validate``, ``test`` and ``predict`` take the same files, and ``--ckpt_path``.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_dist  # noqa: F401  (registers the strategies' names)
from recipes.gpt import GPT
from recipes.text import TextDataModule


class RecipeCLI(LightningCLI):
    """Logs to CSV files under ``runs`` where the configuration names no logger."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        logger = {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "runs"},
        }
        parser.set_defaults({"trainer.logger": logger})


def main() -> None:
    """Runs the command line."""
    RecipeCLI(
        GPT,
        TextDataModule,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
    )


if __name__ == "__main__":
    main()
