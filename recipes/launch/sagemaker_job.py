"""Train a recipe on SageMaker, with version 2 or version 3 of its Python SDK.

.. code-block:: bash

    pip install 'sagemaker<3'    # or 'sagemaker>=3'
    python -m recipes.launch.sagemaker_job --role ROLE --image IMAGE --bucket s3://BUCKET/runs

The image must have torch 2.11 to 2.13: one of AWS's own, or that of ``recipes/launch/Dockerfile``
with ``USER root`` at its end, since SageMaker's files are root's. Both SDKs start torchrun on each
instance, and torchrun starts :mod:`recipes.launch.sagemaker_entry` once for each GPU.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENTRY = "sagemaker_entry.py"
CHECKPOINTS = "/opt/ml/checkpoints"
"""SageMaker copies this folder to the bucket while the job runs, each instance its own."""

HYPERPARAMETERS = {
    "config": "recipes/configs/gpt_1f1b.yaml",
    "trainer.max_epochs": 1,
    "trainer.accelerator": "auto",
    # Rank 0 writes one file: the instances share no disk.
    "trainer.strategy.init_args.save_full": "true",
    "trainer.logger.init_args.save_dir": CHECKPOINTS,
}


def stage(folder: Path) -> None:
    """Copies to a folder what SageMaker uploads: packages, entry and requirements."""
    for package in ("lightning_dist", "recipes"):
        shutil.copytree(ROOT / package, folder / package)
    launch = ROOT / "recipes" / "launch"
    shutil.copy(launch / ENTRY, folder / ENTRY)
    shutil.copy(launch / "sagemaker_requirements.txt", folder / "requirements.txt")


def estimator(source: Path, given: argparse.Namespace, **more: Any) -> Any:
    """Returns version 2's description of the job; ``fit`` runs it."""
    from sagemaker.pytorch import PyTorch

    return PyTorch(
        entry_point=ENTRY,
        source_dir=str(source),
        hyperparameters=HYPERPARAMETERS,
        distribution={"torch_distributed": {"enabled": True}},
        role=given.role,
        image_uri=given.image,
        instance_type=given.instance_type,
        instance_count=given.instances,
        checkpoint_s3_uri=given.bucket,
        checkpoint_local_path=CHECKPOINTS,
        **more,
    )


def model_trainer(source: Path, given: argparse.Namespace, **more: Any) -> Any:
    """Returns version 3's description of the job; ``train`` runs it."""
    from sagemaker.core.shapes import CheckpointConfig
    from sagemaker.train import ModelTrainer
    from sagemaker.train.configs import Compute, SourceCode
    from sagemaker.train.distributed import Torchrun

    return ModelTrainer(
        source_code=SourceCode(
            source_dir=str(source), entry_script=ENTRY, requirements="requirements.txt"
        ),
        hyperparameters=HYPERPARAMETERS,
        distributed=Torchrun(),
        role=given.role,
        training_image=given.image,
        compute=Compute(instance_type=given.instance_type, instance_count=given.instances),
        checkpoint_config=CheckpointConfig(s3_uri=given.bucket, local_path=CHECKPOINTS),
        **more,
    )


def read(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", required=True, help="ARN of the role that runs the job")
    parser.add_argument("--image", required=True, help="address of the image")
    parser.add_argument("--bucket", required=True, help="s3://... for checkpoints")
    parser.add_argument("--instance-type", default="ml.g5.12xlarge")
    parser.add_argument("--instances", type=int, default=2)
    return parser.parse_args(words)


def main() -> None:
    """Runs the job by the version of the SDK that is installed, and waits for it."""
    given = read()
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        if version("sagemaker").startswith("2."):
            estimator(Path(folder), given).fit()
        else:
            model_trainer(Path(folder), given).train()


if __name__ == "__main__":
    main()
