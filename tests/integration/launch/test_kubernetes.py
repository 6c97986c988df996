"""The TrainJob: Kubeflow's own client knows each of its fields, and its command trains.

No cluster is asked. Each host's command is run with the variables that the runtime would set.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from tests.helpers.processes.workers import WorkerPool, free_port
from tests.integration.launch.common import (
    LAUNCH,
    ROOT,
    TIMEOUT_SECONDS,
    assert_trained,
    environment,
)

JOB: Any = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
TRAINER = JOB["spec"]["trainer"]


RESOURCES = ("requests", "limits")  # of any name


def round_trip(job: Any) -> Any:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api"
    )
    return models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()


def misspelt(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each field of a document, and the document with that field misspelt."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            for where, other in misspelt(item, f"{path}[{index}]"):
                yield where, [*node[:index], other, *node[index + 1 :]]
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        where = f"{path}.{name}"
        yield where, {f"{key}z" if key == name else key: node[key] for key in node}
        if name not in RESOURCES:
            for deeper, other in misspelt(value, where):
                yield deeper, {**node, name: other}


@pytest.mark.long
def test_kubeflows_client_knows_each_field() -> None:
    assert round_trip(JOB) == JOB
    fields = dict(misspelt(JOB))
    assert len(fields) > 40
    for field, job in fields.items():
        try:
            found = round_trip(job)
        except ValueError:  # a field that must be there is missing
            continue
        assert found != job, field


def test_its_words_are_those_of_its_numbers() -> None:
    options = parse_args([*TRAINER["command"][1:], *TRAINER["args"]])
    assert (options.module, options.training_script) == (True, "recipes.train")
    assert f"--trainer.num_nodes={TRAINER['numNodes']}" in options.training_script_args
    assert f"--trainer.devices={TRAINER['numProcPerNode']}" in options.training_script_args


@pytest.mark.long
def test_each_hosts_command_trains(workers: WorkerPool, tmp_path: Path) -> None:
    arguments = [word.replace("=/runs", f"={tmp_path}") for word in TRAINER["args"]]
    port = str(free_port())
    hosts = [
        subprocess.Popen(
            [*TRAINER["command"], *arguments],
            cwd=ROOT,
            env=environment(
                PET_NNODES=str(TRAINER["numNodes"]),
                PET_NPROC_PER_NODE=str(TRAINER["numProcPerNode"]),
                PET_NODE_RANK=str(rank),
                PET_MASTER_ADDR="localhost",
                PET_MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(TRAINER["numNodes"])
    ]
    printed = [host.communicate(timeout=TIMEOUT_SECONDS)[0] for host in hosts]
    assert_trained(workers, printed, tmp_path)
