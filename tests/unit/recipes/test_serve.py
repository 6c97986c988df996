"""The server of an exported GPT."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import serve
from recipes.generate import generate
from recipes.gpt import build_gpt
from tests.benchmarks.serving import BAD, ask, connected, load, running_server, share_answered

NEEDED = "the server needs FastAPI"


def client(**options: Any) -> Any:
    pytest.importorskip("fastapi", reason=NEEDED)
    from starlette.testclient import TestClient

    torch.manual_seed(0)
    model = build_gpt(width=16, depth=2, num_heads=2)
    return TestClient(serve.make_app(model, **options)), model


def test_an_answer_is_what_one_device_generates() -> None:
    served, model = client()
    answer = served.post("/generate", json={"prompt": "abc", "num_tokens": 5})
    expected = generate(model, torch.tensor([list(b"abc")]), 5)[0].tolist()
    assert answer.status_code == 200
    assert answer.json() == {"text": bytes(expected).decode(errors="replace")}
    assert served.get("/health").status_code == 200


@pytest.mark.parametrize("what", [*BAD, "many bytes in few letters"])
def test_bad_requests_have_status_422(what: str) -> None:
    served, _ = client()
    body = BAD.get(what) or ('{"prompt": "' + 1000 * "ä" + '"}').encode()
    answer = served.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"]
    assert served.get("/generate").status_code == 405
    assert served.get("/other").status_code == 404


def test_a_body_of_many_brackets_has_status_400() -> None:
    served, _ = client()
    headers = {"Content-Type": "application/json"}
    assert served.post("/generate", content=20_000 * b"[", headers=headers).status_code == 400


def test_more_requests_than_may_wait_have_status_429(monkeypatch: pytest.MonkeyPatch) -> None:
    served, _ = client(most_waiting=1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> torch.Tensor:
        begun.set()
        go_on.wait(60)
        return torch.zeros(1, 1, dtype=torch.int64)

    monkeypatch.setattr(serve, "generate", slow)
    statuses: list[int] = []
    request = {"prompt": "a"}
    first = threading.Thread(
        target=lambda: statuses.append(served.post("/generate", json=request).status_code)
    )
    first.start()
    assert begun.wait(60)
    assert served.post("/generate", json=request).status_code == 429
    go_on.set()
    first.join()
    assert statuses == [200]
    assert served.post("/generate", json=request).status_code == 200, "its place is free again"


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-dist\[serve\]'"):
        serve.make_app(torch.nn.Identity())
    with pytest.raises(SystemExit):
        serve.main([str(tmp_path / "none")])
    assert "There is no file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        serve.main([str(tmp_path / "none")])
    assert "uvicorn. Use `pip install 'lightning-dist[serve]'`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--threads", "0"), ("--most-waiting", "-1")])
def test_numbers_are_checked(capsys: pytest.CaptureFixture[str], words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["none", *words])
    said = capsys.readouterr().err
    assert " ".join(words) in said
    assert "must be 1 or more" in said


@pytest.mark.long
def test_a_process_serves_under_load(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason=NEEDED)
    pytest.importorskip("uvicorn", reason=NEEDED)
    with running_server(tmp_path) as port:
        answers = load(port, num_clients=4, num_requests=5, num_tokens=4)
        assert [status for _, status in answers] == [200] * 20
        with connected(port) as connection:
            assert {ask(connection, body, "/generate") for body in BAD.values()} == {422}


def test_the_load_test_counts_answers_that_are_not_as_documented() -> None:
    def said(good: list[int], crowded: list[int], bad: list[int]) -> str:
        return share_answered({1: good, 48: crowded}, bad)

    assert said([200], [200, 429], [422]).startswith("answered as documented: 100 % of 4 requests")
    assert ": 75 %" in said([429], [200, 429], [422]), "one client never waits for a place"
    assert ": 75 %" in said([200], [200, 503], [404])
    assert ": 75 %" in said([200], [200, 429], [500])
    assert ": 75 %" in said([200], [200, 429], [200])
