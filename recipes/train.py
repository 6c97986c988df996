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

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_dist  # noqa: F401  (registers the strategies' names)


class RecipeCLI(LightningCLI):
    """Logs to CSV files under ``runs`` where the configuration names no logger.

    With ``test_after_fit`` the best checkpoint is tested once training is over.
    """

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        logger = {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "runs"},
        }
        parser.set_defaults(
            {
                "trainer.logger": logger,
                "model": {"class_path": "recipes.gpt.GPT"},
                "data": {"class_path": "recipes.text.TextDataModule"},
            }
        )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="Test the best checkpoint once training is over.",
        )

    def after_fit(self) -> None:
        """Tests the best checkpoint where that was asked for; Lightning calls it."""
        if self.config.fit.test_after_fit and not self.trainer.fast_dev_run:
            self.trainer.test(
                self.model, datamodule=self.datamodule, ckpt_path="best", verbose=False
            )


def main() -> None:
    """Runs the command line."""
    RecipeCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
    )


if __name__ == "__main__":
    main()
