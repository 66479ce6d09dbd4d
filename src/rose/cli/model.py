"""`rose model`: make a small model folder, or describe one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rose.cli.options import add_json_option, print_json, print_table

SUMMARY = "make and inspect model folders"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="write a small random model as a Hugging Face folder")
    new.add_argument("--preset", required=True, metavar="NAME", help="a preset; `rose model presets` lists them")
    new.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write it")
    new.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same bytes (default 0)")
    new.add_argument("--force", action="store_true", help="replace the model that is already there")
    show = actions.add_parser("show", help="check and describe a model folder")
    show.add_argument("folder", type=Path, metavar="DIR")
    presets = actions.add_parser("presets", help="list the presets")
    for action in (show, presets):
        add_json_option(action)


def run(arguments: argparse.Namespace) -> int:
    actions = {"new": _new, "show": _show, "presets": _presets}
    actions[arguments.action](arguments)
    return 0


def _new(arguments: argparse.Namespace) -> None:
    from rose.models.presets import write_preset

    out = write_preset(arguments.preset, arguments.out, arguments.seed, arguments.force)
    print(f"wrote {arguments.preset}, seed {arguments.seed}, to {out}")
    print(f"next: rose serve {arguments.out}")


def _show(arguments: argparse.Namespace) -> None:
    import msgspec

    from rose.models.model_folder import load_model_folder
    from rose.models.tensors import expected_tensors

    folder = load_model_folder(arguments.folder)
    spec, tokenizer = folder.spec, folder.tokenizer
    names = expected_tensors(spec)
    stored = sorted({folder.tensors.dtype(name) for name in names})
    kv_bytes = 4 * spec.kv_values_per_token
    chat = "with" if tokenizer.chat else "without"
    if arguments.json:
        counts = {
            "parameters": sum(map(math.prod, names.values())),
            "stored_as": stored,
            "kv_bytes_per_token": kv_bytes,
        }
        print_json({"model": str(folder.path), **msgspec.to_builtins(spec), **counts})
        return
    rows = {
        "model": str(folder.path),
        "family": f"{spec.family} ({spec.architecture})",
        "parameters": f"{sum(map(math.prod, names.values())):,}, stored as {', '.join(stored).lower()}",
        "layers": f"{spec.layers} of hidden size {spec.hidden}, ffn {spec.ffn}",
        "attention": f"{spec.heads} heads, {spec.kv_heads} for keys and values, of size {spec.head_size}",
        "embeddings": f"{spec.vocabulary} tokens, {'tied' if spec.tied_embeddings else 'untied'}",
        "positions": f"rope {spec.rope.kind}, theta {spec.rope.theta:g}",
        "context": f"{spec.max_context_tokens:,} tokens",
        "kv cache": f"{kv_bytes:,} bytes per token in fp32",
        "tokenizer": f"{tokenizer.size} tokens, {chat} a chat template",
        "end tokens": ", ".join(f"{token_id} {tokenizer.token(token_id)}" for token_id in spec.eos_token_ids) or "none",
    }
    print_table(list(rows.items()))


def _presets(arguments: argparse.Namespace) -> None:
    from rose.models.presets import PRESETS, preset_spec

    if arguments.json:
        import msgspec

        specs = {name: msgspec.to_builtins(preset_spec(preset)) for name, preset in PRESETS.items()}
        print_json({name: {"for": PRESETS[name].summary, **spec} for name, spec in specs.items()})
        return

    print(f"{'preset':<14} {'layers':>6} {'hidden':>6} {'heads':>10} {'ffn':>5} {'vocabulary':>10} {'context':>7}  for")
    for preset in PRESETS.values():
        spec = preset_spec(preset)
        heads = f"{spec.heads}/{spec.kv_heads} x {spec.head_size}"
        sizes = f"{spec.layers:>6} {spec.hidden:>6} {heads:>10} {spec.ffn:>5} {spec.vocabulary:>10}"
        print(f"{preset.name:<14} {sizes} {spec.max_context_tokens:>7}  {preset.summary}")
    print("\nmake one: rose model new --preset qwen3-3m --out models/qwen3-3m")
