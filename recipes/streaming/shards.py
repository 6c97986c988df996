"""Write the recipes' text to shards, files that a stream reads one after the other.

.. code-block:: bash

    python -m recipes.streaming.shards runs/shards
    python -m recipes.streaming.shards runs/shards --sequence-length 256 --shards 16 --force

A shard is a Parquet file with the column ``tokens``. The documents of the text follow each other
without padding and are cut into rows of equal length, so every batch costs as much as any other. A
row has one token more than a sequence: the targets are the inputs, one token on. All shards of a
part have equally many rows, so data replicas and workers with as many shards have as many batches.

A command that was interrupted goes on where it was: a shard has its name once it is whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch import Tensor

from recipes.text import load_text, split_text

PARTS = ("train", "validation")
VOCAB_SIZE = 256
_KEY = b"recipes.streaming"
_INSTALL = "Streams need datasets and torchdata. Use `pip install 'lightning-dist[data]'`."


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """What all shards of a folder have in common; each file has it among its metadata.

    Attributes:
        sequence_length: Tokens of a sequence; a row has one more.
        num_shards: Shards of each part.
        vocab_size: Different tokens; 256 for bytes.
        text_sha256: Hash of the text.
    """

    sequence_length: int
    num_shards: int
    vocab_size: int
    text_sha256: str

    def differences(self, other: ShardFormat) -> str:
        """Returns what differs, as text: names, own values and the other's; empty if nothing."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {own}, not {its}" for name, own, its in pairs if own != its)


def shard_paths(folder: Path, part: str, num_shards: int) -> list[Path]:
    """Returns the paths of a part's shards, in order."""
    return [folder / part / f"{i:05d}-of-{num_shards:05d}.parquet" for i in range(num_shards)]


def found_shards(folder: Path, part: str) -> list[Path]:
    """Returns the shards that a part has, in order."""
    return sorted((folder / part).glob("*-of-*.parquet"))


def read_format(path: Path) -> ShardFormat:
    """Reads the format of a shard.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: The file is no shard.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    try:
        metadata = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}. Write it anew.") from error
    if _KEY not in metadata:
        raise ValueError(f"{path} was not written by `python -m recipes.streaming.shards`.")
    return ShardFormat(**json.loads(metadata[_KEY]))


def write_shards(
    folder: Path, sequence_length: int = 128, num_shards: int = 8, *, force: bool = False
) -> Iterator[str]:
    """Writes the shards that are not there yet, and yields a line about each part.

    Args:
        folder: Folder of the parts.
        sequence_length: Tokens of a sequence.
        num_shards: Shards of each part.
        force: Whether to remove shards of another format; without it they are an error.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: A size is wrong, or there are shards of another format.
    """
    text = load_text()
    wanted = ShardFormat(sequence_length, num_shards, VOCAB_SIZE, hashlib.sha256(text).hexdigest())
    rows = {
        part: _rows(tokens, sequence_length, num_shards)
        for part, tokens in zip(PARTS, split_text(text), strict=True)
    }
    for part in PARTS:
        for path in found_shards(folder, part):
            differences = read_format(path).differences(wanted)
            if differences and not force:
                raise ValueError(
                    f"{path} has {differences}. Name another folder, or replace the shards of this"
                    " one with --force."
                )
            if differences:
                path.unlink()
    for part in PARTS:
        paths = shard_paths(folder, part, num_shards)
        missing = [path for path in paths if not path.exists()]
        for path in missing:
            # Rows in turn: neighbours in the text are in different shards.
            _write(path, rows[part][paths.index(path) :: num_shards], wanted)
        yield (
            f"{folder / part}: {num_shards} shards of {len(rows[part]) // num_shards} rows,"
            f" {len(missing)} of them written now"
        )


def _rows(tokens: Tensor, sequence_length: int, num_shards: int) -> Tensor:
    """Returns ``(N, T + 1)`` tokens, with an ``N`` that the number of shards divides."""
    for name, size in (("sequence_length", sequence_length), ("num_shards", num_shards)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")
    most = (len(tokens) - 1) // sequence_length
    if most < num_shards:
        raise ValueError(
            f"A part of {len(tokens)} tokens has {most} sequences of {sequence_length}, fewer than"
            f" {num_shards} shards. Use shorter sequences or fewer shards."
        )
    rows = tokens.unfold(0, sequence_length + 1, sequence_length)
    return rows[: len(rows) - len(rows) % num_shards]


def _write(path: Path, rows: Tensor, its_format: ShardFormat) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    values = pa.array(rows.flatten().numpy().astype("uint16"))
    column = pa.FixedSizeListArray.from_arrays(values, rows.shape[1])
    table = pa.table({"tokens": column})
    table = table.replace_schema_metadata({_KEY: json.dumps(asdict(its_format))})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pq.write_table(table, part)
    os.replace(part, path)


def main(words: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--shards", type=int, default=8, help="shards of each part")
    parser.add_argument("--force", action="store_true", help="replace shards of another format")
    options = parser.parse_args(words)
    try:
        for line in write_shards(
            options.folder, options.sequence_length, options.shards, force=options.force
        ):
            print(line)
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
