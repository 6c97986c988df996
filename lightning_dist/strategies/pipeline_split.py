"""How a model is cut into stages: decided on the whole model, then carried out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_dist.pipeline.cut import cut, foreign_state_names, own_layers, stage_of_layers
from lightning_dist.strategies.pipeline_config import PipelineConfig
from lightning_dist.strategies.pipelined_module import (
    choose_partition,
    find_sequence,
    refuse_tied_layers,
)


@dataclass(frozen=True)
class PipelineSplit:
    """One stage's part of a model.

    Attributes:
        path: Dotted path of the pipelined module.
        sequence: The pipelined module.
        layers_per_stage: The partition.
        stage_index: This rank's stage.
    """

    path: str
    sequence: nn.Sequential
    layers_per_stage: tuple[int, ...]
    stage_index: int

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that runs whole steps."""
        return self.stage_index == len(self.layers_per_stage) - 1

    def keeps(self, name: str) -> bool:
        """Whether this rank keeps what bears a name in the whole model.

        Args:
            name: Of a module, a parameter or a buffer.
        """
        prefix = f"{self.path}."
        if not name.startswith(prefix):
            return True
        return name.removeprefix(prefix).partition(".")[0] in self.own_names

    @property
    def own_names(self) -> list[str]:
        """Names of this stage's layers in the pipelined module."""
        names = (name for name, _ in self.sequence.named_children())
        stages = stage_of_layers(self.layers_per_stage)
        pairs = zip(names, stages, strict=True)
        return [name for name, stage in pairs if stage == self.stage_index]

    def is_in_a_layer(self, name: str) -> bool:
        """Whether a module is a layer of the pipelined module, or inside of one.

        Args:
            name: In the whole model.
        """
        return name.startswith(f"{self.path}.")

    def cut(self) -> nn.Sequential:
        """Takes the layers of all other stages out of the model.

        Returns:
            Runs those that are left.
        """
        cut(self.sequence, self.layers_per_stage, self.stage_index)
        return own_layers(self.sequence)

    def foreign_names(self) -> set[str]:
        """Names what other stages hold, as in the whole model's state dict."""
        return {f"{self.path}.{name}" for name in foreign_state_names(self.sequence)}

    def is_stored_here(self, name: str) -> bool:
        """Whether this stage puts an entry of its state dict into checkpoints.

        Outside of the layers each stage holds a copy, and the last one alone runs whole steps.

        Args:
            name: Of the entry.
        """
        return self.is_last or self.is_in_a_layer(name)


def find_split(
    module: nn.Module, config: PipelineConfig, num_stages: int, stage_index: int
) -> PipelineSplit:
    """Decides where a model is cut.

    Args:
        module: The whole model, or what an earlier split has left of it.
        config: What the user asks for.
        num_stages: Stages of the pipeline.
        stage_index: This rank's.

    Raises:
        ValueError: It cannot be cut so.
    """
    path, sequence = find_sequence(module, config.layers)
    layers_per_stage = choose_partition(sequence, config.partition, num_stages)
    refuse_tied_layers(sequence, layers_per_stage)
    return PipelineSplit(path, sequence, layers_per_stage, stage_index)
