"""Opening a model folder and checking all of it, so that a bad one fails at start-up and says why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rose.errors import ModelError
from rose.models.model_spec import ModelSpec, read_spec
from rose.models.tensors import Tensors, check, open_tensors
from rose.models.tokenizer import TOKENIZER_FILE, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that can be served: its spec, its weights (not read yet) and its tokenizer."""

    path: Path
    spec: ModelSpec
    tensors: Tensors
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.path.resolve().name


def load_model_folder(path: Path | str) -> ModelFolder:
    """Read and check a model folder as Hugging Face writes it. Raises ModelError naming the file at fault."""
    path = Path(path)
    if not path.is_dir():
        what = f"{path} is not a folder" if path.exists() else f"there is no model folder {path}"
        raise ModelError(what, hint=f"make one: rose model new --preset qwen3-3m --out {path}")
    spec = served_spec(path)
    tensors = open_tensors(path)
    check(tensors, spec)
    tokenizer = Tokenizer.load(path)
    tokenizer.check_vocabulary(spec.vocabulary, str(path / "config.json"))
    return ModelFolder(path, spec, tensors, tokenizer)


def served_spec(path: Path) -> ModelSpec:
    """Return the spec of a folder, with the end token of its tokenizer if it has one."""
    spec = read_spec(path)
    if not (path / TOKENIZER_FILE).exists():
        return spec
    ends = dict.fromkeys(spec.eos_token_ids + Tokenizer.load(path).eos_ids)
    return replace(spec, eos_token_ids=tuple(ends))
