"""List the models of the catalog, or show one with its sizes, counts and source.

phalanx models
phalanx models llama-3.1-405b --seq 8192
phalanx models mine.toml --json
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from phalanx.api.catalog import models_document
from phalanx.api.limits import limits_of
from phalanx.catalog import load
from phalanx.catalog.load import ModelEntry
from phalanx.cli.table import format_argument, print_facts, print_table
from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape
from phalanx.core.units import show_bytes, show_count, show_flops, show_share
from phalanx.cost.flops import describe_convention, flops_per_token
from phalanx.cost.state import MIXED_ADAM

HEADERS = ("model", "params", "active", "layers", "hidden", "heads", "kv", "ffn", "vocab", "kind")


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("model", nargs="?", help="a catalog name or a .toml file (default: all)")
    parser.add_argument(
        "--seq", type=int, default=8192, help="tokens per sequence for FLOP (default 8192)"
    )
    parser.add_argument(
        "--on", metavar="CLUSTER", help="also what hides messages there, for one model: h100x64"
    )
    format_argument(parser)


def run(args: Namespace) -> int:
    """List all models, or show one.

    Raises:
        UsageError: an unknown name, a sequence without tokens, or --on without a model.
    """
    if args.seq < 1:
        raise UsageError(f"--seq is {args.seq}; a sequence has at least 1 token")
    if args.on and not args.model:
        raise UsageError("--on is for one model; name it: phalanx models llama-3.1-8b --on h100x64")
    entries = [load.model_entry(args.model)] if args.model else load.models()
    limits = limits_of(entries[0].shape, load.cluster(args.on)) if args.on else None
    if args.json:
        print(json.dumps(models_document(entries, args.seq, limits), indent=2))
    elif args.model:
        facts = _facts(entries[0], args.seq) + (_limits(limits) if limits else [])
        print_facts(facts, args.format)
    else:
        print_table(HEADERS, [_row(entry.shape) for entry in entries], args.format)
    return 0


def _row(shape: ModelShape) -> list[str]:
    active = show_count(shape.active_params()) if shape.is_moe else "-"
    sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab)
    return [shape.name, show_count(shape.params()), active, *map(str, sizes), _kind(shape)]


def _kind(shape: ModelShape) -> str:
    parts = ["latent attention"] if shape.is_mla else []
    if shape.is_moe:
        shared = f"+{shape.shared_experts}" if shape.shared_experts else ""
        parts.append(f"{shape.experts} experts, {shape.top_k}{shared} per token")
    parts += [shape.activation, "tied"] if shape.tied else [shape.activation]
    return ", ".join(parts)


def _facts(entry: ModelEntry, seq: int) -> list[tuple[str, str]]:
    shape = entry.shape
    return [
        ("model", shape.name),
        ("also called", ", ".join(entry.aliases)),
        ("parameters", f"{show_count(shape.params())} ({shape.params():,})"),
        ("published", _published(entry)),
        ("active", f"{show_count(shape.active_params())} per token" if shape.is_moe else ""),
        ("layers", str(shape.layers)),
        ("hidden", str(shape.hidden)),
        ("heads", f"{shape.heads} of {shape.head_dim}, {shape.kv_heads} for keys and values"),
        ("ffn", _ffn(shape)),
        ("vocabulary", f"{shape.vocab:,}"),
        ("kind", _kind(shape)),
        ("norm, positions", f"{shape.norm}, {shape.positions}"),
        ("weights", f"{show_bytes(2 * shape.params())} in bf16"),
        (
            "training state",
            f"{show_bytes(MIXED_ADAM.total * shape.params())} at 16 bytes per parameter",
        ),
        ("training", _training(shape, seq)),
        ("source", entry.source + ("" if entry.verified or not entry.source else " (unverified)")),
        ("notes", entry.notes),
    ]


def _limits(limits: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What hides messages behind arithmetic, as lines; empty where there is no such fabric."""
    tp, near, far = (
        limits[key] for key in ("tensor_limit", "domain_tokens_floor", "network_tokens_floor")
    )
    return [
        ("on", limits["cluster"]),
        ("tensor messages", f"hide inside a domain up to tp={tp:.3g}" if tp else ""),
        ("data messages", f"hide inside a domain from {near:,.0f} tokens a device" if near else ""),
        ("across domains", f"data messages hide from {far:,.0f} tokens a device" if far else ""),
    ]


def _ffn(shape: ModelShape) -> str:
    if not shape.is_moe:
        return str(shape.ffn)
    each = f"{shape.moe_ffn or shape.ffn} in each expert"
    return (
        f"{shape.ffn} in {shape.dense_layers} dense layers, {each}" if shape.dense_layers else each
    )


def _published(entry: ModelEntry) -> str:
    if not entry.published_params:
        return ""
    off = entry.shape.params() / entry.published_params - 1
    return f"{show_count(entry.published_params)}; ours is off by {show_share(off)}"


def _training(shape: ModelShape, seq: int) -> str:
    flops = show_flops(flops_per_token(shape, seq, causal=True))
    return f"{flops} per token at seq {seq}: {describe_convention(causal=True)}"
