"""An HTTP server for an exported GPT.

.. code-block:: bash

    pip install 'lightning-dist[serve]'
    python -m lightning_dist export IN gpt.safetensors --format safetensors --prefix model.
    python -m recipes.serve gpt.safetensors
    curl localhost:8000/generate --json '{"prompt": "The statement", "num_tokens": 40}'

One request computes at a time, on as many threads as ``--threads`` says; others wait for it, and
more than may wait are sent away.
"""

import argparse
import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recipes.generate import generate, load_exported

MOST_BYTES = 1024
MOST_TOKENS = 512
_INSTALL = "Use `pip install 'lightning-dist[serve]'`."


def make_app(model: nn.Module, most_waiting: int = 32) -> Any:
    """Creates the application.

    ``POST /generate`` takes a prompt and a number of bytes to add, and returns the text. A request
    that is not understood is answered with status 422, one for which there is no room with 429.
    ``GET /health`` answers when the model is loaded.

    Args:
        model: Maps ``(B, T)`` bytes to ``(B, T, 256)`` logits.
        most_waiting: Requests that compute or wait, at most.

    Returns:
        A ``fastapi.FastAPI``.

    Raises:
        ImportError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI, HTTPException
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import Response
        from pydantic import BaseModel, Field
    except ImportError as error:
        raise ImportError(f"The server needs FastAPI. {_INSTALL}") from error

    class Request(BaseModel, extra="forbid", strict=True):
        prompt: str = Field(min_length=1, max_length=MOST_BYTES)
        num_tokens: int = Field(default=64, ge=1, le=MOST_TOKENS)

    class Answer(BaseModel):
        text: str

    app = FastAPI(title="GPT")
    places, computing = threading.BoundedSemaphore(most_waiting), threading.Lock()

    @app.exception_handler(RequestValidationError)
    def refuse(_: object, error: RequestValidationError) -> Response:
        # Without the input, which may be NaN, and escaped, for a name may be half a surrogate.
        found = [{key: it[key] for key in ("type", "loc", "msg")} for it in error.errors()]
        return Response(json.dumps({"detail": found}), 422, media_type="application/json")

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/generate")
    def extend(request: Request) -> Answer:  # in a thread of the server's pool
        prompt = request.prompt.encode()
        if len(prompt) > MOST_BYTES:
            raise HTTPException(422, f"The prompt has more than {MOST_BYTES} bytes.")
        if not places.acquire(blocking=False):
            raise HTTPException(429, f"{most_waiting} requests are waiting. Try again later.")
        try:
            with computing:
                found = generate(model, torch.tensor([list(prompt)]), request.num_tokens)
        finally:
            places.release()
        return Answer(text=bytes(found[0].tolist()).decode(errors="replace"))

    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.serve")
    parser.add_argument("model", help="a GPT that was exported as safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--most-waiting", type=int, default=32, help="more get status 429")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is best for a few MB")
    options = parser.parse_args(arguments)
    if options.threads < 1 or options.most_waiting < 1:
        parser.error(
            f"--threads {options.threads} and --most-waiting {options.most_waiting}"
            " must be 1 or more."
        )
    torch.set_num_threads(options.threads)
    try:
        import uvicorn
    except ImportError:
        parser.error(f"The server needs uvicorn. {_INSTALL}")
    try:
        app = make_app(load_exported(options.model), options.most_waiting)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
