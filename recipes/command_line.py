"""The command line of :mod:`recipes.train`: Lightning's own, with a recipe's defaults."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_dist  # noqa: F401  (registers the strategies' names)
from recipes.catalog import Recipe


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
            "--recipe",
            type=Recipe | None,
            default=None,
            help="What a configuration says of itself, for `python -m recipes list`.",
        )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="Test the best checkpoint once training is over.",
        )

    def after_fit(self) -> None:
        """Tests the best checkpoint if that was asked for; called by Lightning."""
        if self.config.fit.test_after_fit and not self.trainer.fast_dev_run:
            self.trainer.test(
                self.model, datamodule=self.datamodule, ckpt_path="best", verbose=False
            )


def run(callbacks: Sequence[L.Callback] = ()) -> None:
    """Runs the command line of this process.

    Args:
        callbacks: Further callbacks of the trainer.
    """
    RecipeCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [*callbacks]},
        auto_configure_optimizers=False,
    )
