"""The job for SageMaker: described to both SDKs, which check it; its entry under torchrun.

No service is asked: what it does with the job is untested.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from recipes.launch import sagemaker_job
from tests.helpers.processes.workers import WorkerPool
from tests.integration.launch.common import assert_trained, launch

pytestmark = pytest.mark.long


@pytest.fixture
def given() -> argparse.Namespace:
    image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/recipes:1"
    role = "arn:aws:iam::123456789012:role/trainer"
    return sagemaker_job.read(["--role", role, "--image", image, "--bucket", "s3://bucket/runs"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    sagemaker_job.stage(folder)
    return folder


def aws() -> Any:
    boto3 = pytest.importorskip("boto3", reason="pip install 'sagemaker<3' or 'sagemaker>=3'")
    return boto3.Session("key", "secret", region_name="us-west-2")


@pytest.mark.filterwarnings("ignore")  # of the SDK's own imports
def test_the_installed_sdk_takes_the_job(
    given: argparse.Namespace, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = aws()
    if version("sagemaker").startswith("2."):
        from sagemaker import Session

        connected = Session(boto_session=session)
        job = sagemaker_job.estimator(source, given, sagemaker_session=connected)
        assert job.distribution == {"torch_distributed": {"enabled": True}}
        assert job.source_dir == str(source)
    else:
        from sagemaker.core.helper.session_helper import Session as Connected
        from sagemaker.train import defaults

        # AWS alone knows what the role may do.
        unasked = lambda provided_role, **_: provided_role  # noqa: E731
        monkeypatch.setattr(defaults, "resolve_and_validate_role", unasked)
        connected = Connected(boto_session=session)
        connected._default_bucket = "bucket"  # else it asks for the account's
        sagemaker_job.model_trainer(source, given, sagemaker_session=connected)
        (source / sagemaker_job.ENTRY).unlink()
        with pytest.raises(ValueError, match=sagemaker_job.ENTRY):
            sagemaker_job.model_trainer(source, given, sagemaker_session=connected)


def test_the_entry_trains_under_torchrun(workers: WorkerPool, source: Path, tmp_path: Path) -> None:
    words = [
        *("--config", f"{source}/recipes/configs/gpt_1f1b.yaml"),
        *("--config", f"{source}/recipes/launch/tiny.yaml"),
        *("--trainer.logger.init_args.save_dir", str(tmp_path)),
    ]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2"]
    assert_trained(workers, launch([*torchrun, source / sagemaker_job.ENTRY, *words]), tmp_path)
