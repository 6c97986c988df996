"""The command line of :mod:`recipes.train`: Lightning's own, with a recipe's defaults."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

import lightning as L
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

import lightning_dist  # noqa: F401  (registers the strategies' names)
from lightning_dist.strategies.base.process_mesh import ProcessMesh
from recipes.catalog import Recipe
from recipes.wandb_checkpoints import PREFIX, download_checkpoint


class LoggedConfig(SaveConfigCallback):
    """Logs the configuration with the versions of what it has run with, beside saving it."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # MLflow's logger has no folder where its runs are in a database.
        self.save_to_log_dir = trainer.log_dir is not None
        super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        logged = {
            "config": yaml.safe_load(self.parser.dump(self.config, skip_none=False)),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "lightning": L.__version__,
                "lightning_dist": version("lightning-dist"),
            },
        }
        if isinstance(strategy, ProcessMesh):
            logged["mesh"] = strategy.mesh.sizes
        for logger in trainer.loggers:
            logger.log_hyperparams(logged)


class RecipeCLI(LightningCLI):
    """Logs to CSV files under ``runs`` where the configuration names no logger.

    With ``test_after_fit`` the best checkpoint is tested once training is over, or the last weights
    if none was saved.
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
            help="Test the best checkpoint, if any was saved, once training is over.",
        )

    @override
    def instantiate_classes(self) -> None:
        """Builds model, data and trainer; a missing package ends the process with its name."""
        try:
            super().instantiate_classes()
        except Exception as error:  # of the parser, on top of what its causes say
            cause: BaseException | None = error
            while not isinstance(cause, ImportError | None):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            sys.exit(f"error: {cause}")

    @override
    def before_instantiate_classes(self) -> None:
        """Downloads the checkpoint of a ``--ckpt_path=wandb:...``; takes a bare class."""
        config = self.config[self.subcommand]
        strategy = config.trainer.strategy
        if isinstance(strategy, str) and "." in strategy:  # no registered name has a dot
            config.trainer.strategy = Namespace(class_path=strategy)
        if str(config.get("ckpt_path")).startswith(PREFIX):
            config.ckpt_path = str(download_checkpoint(config.ckpt_path))

    def after_fit(self) -> None:
        """Tests the best checkpoint if that was asked for; called by Lightning."""
        if not self.config.fit.test_after_fit or self.trainer.fast_dev_run:
            return
        checkpoint = self.trainer.checkpoint_callback
        best = checkpoint.best_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
        if not best:
            rank_zero_info("No checkpoint was saved, so the last weights are tested.")
        self.trainer.test(
            self.model, datamodule=self.datamodule, ckpt_path=best or None, verbose=False
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
        save_config_callback=LoggedConfig,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [*callbacks]},
        auto_configure_optimizers=False,
    )
