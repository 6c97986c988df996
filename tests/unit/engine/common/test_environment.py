from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_dist.engine.common.environment import (
    Environment,
    compare_environments,
    digest_script,
    name_places,
    transport_variables,
)


def test_differences_are_listed_by_value_with_their_hosts() -> None:
    same = {"Python": "3.11.2"}
    table = compare_environments(
        [
            Environment("a", {**same, "torch": "2.13.0"}),
            Environment("a", {**same, "torch": "2.13.0"}),
            Environment("b", {**same, "torch": "2.12.1", "NCCL_ALGO": "Ring"}),
        ]
    )
    assert table.rows == (
        ("NCCL_ALGO", "(not set)", "a (ranks 0, 1)"),
        ("", "Ring", "b (rank 2)"),
        ("torch", "2.13.0", "a (ranks 0, 1)"),
        ("", "2.12.1", "b (rank 2)"),
    )


def test_equal_environments_have_no_row_and_one_digest() -> None:
    # The order in which variables were set says nothing.
    one, other = Environment("a", {"x": "1", "y": "2"}), Environment("b", {"y": "2", "x": "1"})
    assert compare_environments([one, other]).rows == ()
    assert one.digest == other.digest
    assert one.digest != Environment("a", {"x": "1", "y": "3"}).digest


def test_variables_of_a_host_itself_may_differ() -> None:
    kept = {"NCCL_ALGO": "Ring", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "GLOO_X": ""}
    own = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5_0",
        "NCCL_DEBUG": "INFO",
        "TORCH_HOME": "/a",
        "PATH": "/bin",
        "TORCHELASTIC_RUN_ID": "7",
    }
    assert transport_variables({**kept, **own}) == kept


def test_many_ranks_and_hosts_are_counted() -> None:
    hosts = [f"h{rank // 10}" for rank in range(100)]
    text = name_places(range(100), hosts)
    assert text.startswith("h0 (ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more), h1 (")
    assert text.endswith(" and 2 more")


def test_the_script_counts_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for text in ("one", "two", "one"):
        script = tmp_path / f"{len(digests)}.py"
        script.write_text(text)
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
        digests.append(digest_script())
    assert digests[0] == digests[2] != digests[1]
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # a notebook
    assert digest_script() == "none"
