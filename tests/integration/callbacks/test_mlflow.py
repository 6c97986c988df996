"""What MLflow shows of a profiled run: metrics, configuration, pictures, tables, the page."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.loggers import MLFlowLogger

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StageBalancer, StepProfiler
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool

mlflow = pytest.importorskip(
    "mlflow", reason="mlflow is not installed: pip install mlflow-skinny alembic sqlalchemy"
)


def uri(folder: str) -> str:
    return f"sqlite:///{folder}/runs.db"


def fit(folder: str) -> tuple[dict[str, float], dict[str, str], list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's own, of other versions of what it needs
        return fit_and_read(folder)


def fit_and_read(folder: str) -> tuple[dict[str, float], dict[str, str], list[str]]:
    logger = MLFlowLogger(tracking_uri=uri(folder), artifact_location=f"{folder}/artifacts")
    callbacks: list[L.Callback] = [
        StepProfiler(active_steps=2, warmup_steps=0, trace_dir=folder),
        StageBalancer(every_n_steps=5, measured_steps=2, warmup_steps=1),
    ]
    trainer = make_trainer(
        devices=2,
        strategy=PipelineStrategy(num_microbatches=2),
        logger=logger,
        callbacks=callbacks,
        log_every_n_steps=1,
        limit_val_batches=0,
    )
    trainer.fit(make_module(), make_loader(), make_loader())
    if not trainer.is_global_zero:
        return {}, {}, []
    logger.log_hyperparams({"versions": {"torch": "2"}})
    client, run = logger.experiment, logger.experiment.get_run(logger.run_id)
    folders, files = [""], []
    while folders:
        for item in client.list_artifacts(run.info.run_id, folders.pop()):
            (folders if item.is_dir else files).append(item.path)
    return run.data.metrics, run.data.params, files


@pytest.mark.long
def test_mlflow_gets_what_it_can_show(workers: WorkerPool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.MlflowClient(uri(str(tmp_path)))  # makes the tables: two ranks at once cannot
    (metrics, parameters, files), _ = workers.run(2, fit, str(tmp_path), timeout=120)
    assert {"profile/step_seconds", "profile/bubble_fraction", "balance/gain"} <= set(metrics)
    assert parameters["versions/torch"] == "2"
    kinds = {(path.rpartition("/")[0], Path(path).suffix) for path in files}
    assert {("profile/timeline", ".png"), ("balance/picture", ".png")} <= kinds
    assert {("profile/memory", ".md"), ("balance/layers", ".md")} <= kinds
    assert ("profile/page", ".html") in kinds
