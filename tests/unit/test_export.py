"""Weights in the formats that other programs read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.__main__ import main
from lightning_dist.engine.checkpoint import saved_names
from lightning_dist.engine.checkpoint.files import save_full, save_sharded
from lightning_dist.export import _example
from recipes.gpt import GPT

SIZES = {"width": 16, "depth": 2, "num_heads": 2}
TOKENS = torch.arange(24).view(3, 8)
LAYOUTS = ("file", "shards")
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


class Tied(L.LightningModule):
    """Has two names for one parameter, and more in its state dict than tensors."""

    def __init__(self, width: int = 8, labels: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Embedding(32, width), nn.Linear(width, 32, bias=False))
        self.model[1].weight = self.model[0].weight

    def get_extra_state(self) -> str:
        return "no tensor"

    def set_extra_state(self, state: Any) -> None:
        pass

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


def write(module: L.LightningModule, path: Path | str, layout: str) -> Path | str:
    """Writes a checkpoint as training does, with a state of the optimizer."""
    state = module.state_dict()
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": L.__version__,
        "hyper_parameters": dict(module.hparams),
        "state_dict": state,
        "optimizer_states": [{"state": {}, "param_groups": []}],
    }
    if layout == "file":
        save_full(checkpoint, path)
    else:
        folded = saved_names.fold(checkpoint, ["state_dict"], saved_names.first_names(module))
        save_sharded(folded, path, None)
    return path


def export(*words: object) -> None:
    main(["export", *map(str, words)])


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as error:
        export(*words)
    assert error.value.code == 2
    return capsys.readouterr().err


LOAD = """
import sys
sys.modules["lightning_dist"] = sys.modules["lightning"] = None
import torch
from safetensors.torch import load_model
from torch import nn

logits = {}
for layout in ("file", "shards"):
    for kind in ("safetensors", "torch"):
        model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32, bias=False))
        model[1].weight = model[0].weight
        if kind == "safetensors":
            load_model(model, f"{layout}.{kind}")
        else:
            model.load_state_dict(torch.load(f"{layout}.{kind}"))
        logits[layout, kind] = model(torch.arange(24).view(3, 8)).detach()
torch.save(logits, "logits.pt")
"""


def test_loads_without_this_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Tied()
    for layout in LAYOUTS:
        source = write(module, tmp_path / f"{layout}.ckpt", layout)
        for kind in ("safetensors", "torch"):
            words = ("--format", kind, "--prefix", "model.", "--module", f"{__name__}:Tied")
            export(source, tmp_path / f"{layout}.{kind}", "--unpickle", *words)
    said = capsys.readouterr().out
    assert said.count(": 1 tensors. 1 more names are tied to one of them, 1 entries") == 4
    sizes = {p.stat().st_size for p in tmp_path.glob("*.safetensors")}
    assert max(sizes) < 2 * module.model[0].weight.nbytes, "the tied tensor is stored once"
    subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, check=True, timeout=120)
    found: Mapping[Any, Tensor] = torch.load(tmp_path / "logits.pt")
    expected = module(TOKENS)
    assert len(found) == 4
    assert all(torch.equal(logits, expected) for logits in found.values())
    left = {path.name for path in tmp_path.iterdir()}
    assert not any(name.startswith(".") for name in left), "no temporary file is left"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_at_a_url(tmp_path: Path, layout: str) -> None:
    module = GPT(**SIZES)
    write(module, f"file://{tmp_path}/in.ckpt", layout)
    export(f"file://{tmp_path}/in.ckpt", tmp_path / "out", "--format", "torch")
    weights = torch.load(tmp_path / "out")
    assert weights.keys() == module.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hugging_face_reads_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)

    class Wrapped(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = GPT2LMHeadModel(config)

    module = Wrapped().eval()
    source = write(module, tmp_path / "in.ckpt", layout)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "config")
    words = ("--format", "hf", "--prefix", "network.", "--config", tmp_path / "config")
    for _ in range(2):  # a directory of a model alone may be replaced
        export(source, tmp_path / "out", "--force", *words)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(TOKENS).logits, module.network(TOKENS).logits)
    names = {path.name for path in (tmp_path / "out").iterdir()} | {"tokenizer.json"}
    (tmp_path / "out" / "tokenizer.json").touch()
    with pytest.raises(SystemExit):
        export(source, tmp_path / "out", "--force", *words)
    assert "it has 'tokenizer.json'" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


RUN_ONNX = """
import sys
sys.modules["lightning_dist"] = sys.modules["lightning"] = sys.modules["torch"] = None
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("out.onnx")
(name,) = (taken.name for taken in session.get_inputs())
for size in (1, 3, 5):
    tokens = np.arange(8 * size).reshape(size, 8)
    np.save(f"{size}.npy", session.run(None, {name: tokens})[0])
"""


@pytest.mark.long
def test_onnx_takes_batches_of_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}")
    module = GPT(**SIZES)
    source = write(module, tmp_path / "in.ckpt", "shards")
    words = ("--module", "recipes.gpt:GPT", "--example", "2x8:int64")
    export(source, tmp_path / "out.onnx", "--format", "onnx", *words)
    words = ("--module", "recipes.gpt:GPT", "--example", "2x8x3:int64", "--format", "onnx")
    assert "with --example 2x8x3:int64: " in refusal(capsys, source, tmp_path / "no.onnx", *words)
    subprocess.run([sys.executable, "-c", RUN_ONNX], cwd=tmp_path, check=True, timeout=120)
    for size in (1, 3, 5):
        logits = torch.from_numpy(np.load(tmp_path / f"{size}.npy"))
        expected = module(torch.arange(8 * size).view(size, 8))
        assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.long
def test_torch_export_takes_batches_of_any_size(tmp_path: Path) -> None:
    model = GPT(**SIZES).model.eval()
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(model, (TOKENS,), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "gpt.pt2")
    loaded = torch.export.load(tmp_path / "gpt.pt2").module()
    for size in (1, 3, 5):
        tokens = torch.arange(8 * size).view(size, 8)
        assert torch.allclose(loaded(tokens), model(tokens), atol=1e-6)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(GPT(**SIZES), tmp_path / "in.ckpt", "file")
    other = write(Tied(), tmp_path / "other.ckpt", "shards")
    target, text = tmp_path / "out", tmp_path / "text.ckpt"
    target.write_text("precious")
    text.write_text("no checkpoint at all" * 99)
    listed = tmp_path / "listed.ckpt"
    torch.save({"state_dict": [torch.ones(1)]}, listed)
    tensor, unsafe = tmp_path / "tensor.ckpt", tmp_path / "unsafe.ckpt"
    torch.save(torch.ones(1), tensor)
    torch.save({"state_dict": {}, "hyper_parameters": {"where": Path()}}, unsafe)
    by_command = tmp_path / "by_command.ckpt"  # of Lightning's command line, which notes the class
    hyperparameters = {"_class_path": "tests.unit.test_export.Tied", "_instantiator": INSTANTIATOR}
    torch.save({"state_dict": {}, "hyper_parameters": hyperparameters}, by_command)
    adapters = tmp_path / "adapters.ckpt"
    torch.save({"state_dict": {"model.q.lora_A.default.weight": torch.ones(1)}}, adapters)
    kind = ("--format", "safetensors")
    assert "add --force" in refusal(capsys, source, target, *kind)
    forced = (target, "--force", *kind)
    checked = (*forced, "--module", "recipes.gpt:GPT")
    cases = {
        "invalid choice: 'gguf'": (source, target, "--force", "--format", "gguf"),
        "begins with --prefix 'net.'": (source, *forced, "--prefix", "net."),
        "another model than GPT": (other, "--unpickle", *checked),
        "another model than GPT: The class": (by_command, *checked),
        "adapters without their base": (adapters, *checked),
        "such as 'model.q.lora_A": (adapters, *forced[:-1], "hf", "--config", tmp_path),
        "has no config.json": (source, *forced[:-1], "hf", "--config", tmp_path),
        "has no attribute 'Other'": (source, *forced, "--module", "recipes.gpt:Other"),
        "nor a directory": (tmp_path / "none.ckpt", *forced),
        "is no checkpoint, or": (text, *forced),
        "has no 'state_dict'": (tensor, *forced),
        "no 'state_dict' that is a dict": (listed, *forced),
        "nn:Linear is no LightningModule": (source, *forced, "--module", "torch.nn:Linear"),
        "build_gpt is no Light": (source, *forced, "--module", "recipes.gpt:build_gpt"),
        "holds other objects": (unsafe, *forced),
        "needs --config": (source, target, "--force", "--format", "hf"),
        "and --example": (source, *forced[:-1], "onnx", "--module", "recipes.gpt:GPT"),
    }
    for expected, words in cases.items():
        assert expected in refusal(capsys, *words)
        assert target.read_text() == "precious"


def test_a_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(GPT(**SIZES), tmp_path / "in.ckpt", "file")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    words = (source, tmp_path / "out", "--format", "safetensors")
    assert "pip install 'lightning-dist[export]'" in refusal(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_a_failing_write_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(GPT(**SIZES), tmp_path / "in.ckpt", "shards")
    target = tmp_path / "out"
    target.write_text("precious")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    said = refusal(capsys, source, target, "--force", "--format", "torch")
    assert "No space left" in said
    assert target.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.ckpt", "out"]


@pytest.mark.parametrize("text", ["2x8:quint8", "2x8:qint32", "2x8:none"])
def test_an_example_has_a_plain_dtype(text: str) -> None:
    with pytest.raises(ValueError, match=f"--example {text}: use sizes and a dtype"):
        _example(text)
