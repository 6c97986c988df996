"""A load test of the server: ``python -m tests.benchmarks.serving`` prints rates and latencies.

A server of a GPT with random weights is a process. Clients are threads of this one, each with a
connection of its own, and ask again as soon as they have an answer. Bad requests come at the end.
The last line says how many of all requests were answered as ``docs/inference.md`` says.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from lightning_dist.__main__ import main as command
from lightning_dist.engine.checkpoint.files import save_full
from recipes.gpt import GPT
from tests.helpers.processes.workers import free_port

MOST_WAITING = 32
"""Requests that compute or wait in the server, at most."""
BAD = {
    "no JSON": b"{",
    "no prompt": b"{}",
    "an empty prompt": b'{"prompt": ""}',
    "a prompt of 2,000 bytes": json.dumps({"prompt": "a" * 2000}).encode(),
    "a number for a prompt": b'{"prompt": 7}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "no number": b'{"prompt": "a", "num_tokens": NaN}',
    "an infinite number": b'{"prompt": "a", "num_tokens": 1e400}',
    "too many tokens": b'{"prompt": "a", "num_tokens": 100000}',
    "half a surrogate for a name": b'{"prompt": "a", "\\ud800": 1}',
    "an unknown argument": b'{"prompt": "a", "temperature": 1}',
}


@contextmanager
def running_server(folder: Path, *words: str) -> Iterator[int]:
    """Returns a context manager in which a server runs, with its port."""
    checkpoint = {"state_dict": (gpt := GPT()).state_dict(), "hyper_parameters": dict(gpt.hparams)}
    source, target, port = folder / "in.ckpt", folder / "gpt.safetensors", free_port()
    save_full(checkpoint, source)
    command(["export", str(source), str(target), "--format", "safetensors", "--prefix", "model."])
    server = (sys.executable, "-m", "recipes.serve", str(target), "--port", str(port), *words)
    process = subprocess.Popen(server)
    try:
        while process.poll() is None:
            try:
                with connected(port) as connection:
                    assert ask(connection, None, "/health") == 200
                break
            except ConnectionError:
                time.sleep(0.1)
        else:
            raise RuntimeError(f"The server ended with {process.returncode}.")
        yield port
    finally:
        process.terminate()
        process.wait()


def connected(port: int) -> closing[http.client.HTTPConnection]:
    """Returns a context manager with a connection to the server."""
    return closing(http.client.HTTPConnection("127.0.0.1", port))


def ask(connection: http.client.HTTPConnection, body: bytes | None, path: str) -> int:
    """Sends a request, and returns the status of the answer."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def load(
    port: int, num_clients: int, num_requests: int, num_tokens: int
) -> list[tuple[float, int]]:
    """Returns seconds and status of each of the clients' requests."""
    body = json.dumps({"prompt": "The statement", "num_tokens": num_tokens}).encode()

    def run(_: int) -> list[tuple[float, int]]:
        answers = []
        with connected(port) as connection:
            for _ in range(num_requests):
                begin = time.perf_counter()
                status = ask(connection, body, "/generate")
                answers.append((time.perf_counter() - begin, status))
        return answers

    with ThreadPoolExecutor(num_clients) as pool:
        return [answer for answers in pool.map(run, range(num_clients)) for answer in answers]


def share_answered(statuses: Mapping[int, Sequence[int]], bad: Sequence[int]) -> str:
    """Returns a line with the share of requests that were answered as they ought to be.

    Args:
        statuses: Status of each good request, by the number of clients. It is to be 200, or 429
            where more clients ask than may wait.
        bad: Status of each bad request, which is to be one of 400 to 499.
    """
    right = [
        status == 200 or (status == 429 and num_clients > MOST_WAITING)
        for num_clients, each in statuses.items()
        for status in each
    ]
    right += [400 <= status < 500 for status in bad]
    percent = 100 * sum(right) / len(right)
    return (
        f"answered as documented: {percent:.6g} % of {len(right)} requests, {len(bad)} of them bad"
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of all clients")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        running_server(Path(name), "--most-waiting", str(MOST_WAITING)) as port,
    ):
        load(port, 1, 5, options.tokens)
        print(f"{options.tokens} tokens behind a prompt of 13 bytes, from a GPT of 4 blocks")
        statuses: dict[int, list[int]] = {}
        for num_clients in (1, 4, 16, 48):
            begin = time.perf_counter()
            each = max(2, options.requests // num_clients)
            answers = load(port, num_clients, each, options.tokens)
            seconds = time.perf_counter() - begin
            statuses[num_clients] = [status for _, status in answers]
            good = [taken for taken, status in answers if status == 200]
            cuts = [1e3 * cut for cut in statistics.quantiles(good, n=100)]
            print(
                f"{num_clients:3} clients {len(good) / seconds:7.1f} answers/s   latency p50"
                f" {cuts[49]:6.0f} ms, p95 {cuts[94]:6.0f} ms, p99 {cuts[98]:6.0f} ms   "
                f" {dict(Counter(statuses[num_clients]))}"
            )
        with connected(port) as connection:
            bad = {what: ask(connection, body, "/generate") for what, body in BAD.items()}
            bad["another path"] = ask(connection, None, "/other")
        for what, status in bad.items():
            print(f"{what}: {status}")
        print(share_answered(statuses, list(bad.values())))


if __name__ == "__main__":
    main()
