"""The command `generate`: continue texts or answer messages."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.cli.arguments import WARMER, InputError, check_together, read_sampling
from models.cli.modes import Job, continue_prompts, search_beams, serve_file
from models.cli.prompts import encode, read_prompts, warn_of_control
from models.cli.report import note_shares
from models.cli.screen import megabytes, note, progress
from models.meshes import RULES, make_mesh
from models.model import Model, load


def run(args: argparse.Namespace, check_interrupt: Callable[[], None]) -> int:
    """Run the command `generate`; return the exit code, which is 130 after an interrupt.

    After an interrupt, the command ends at the next piece of text and prints the partial texts.
    """
    check_together(args)
    written = read_prompts(args)
    sampling, seed = read_sampling(args, beams=bool(args.beams))
    if args.samples > 1 and not sampling:
        note(f"note: the {args.samples} samples of a prompt are equal at temperature 0: {WARMER}")
    mesh = make_mesh(args.mesh) if args.mesh else None
    with jax.set_mesh(mesh) if mesh else nullcontext():
        model = load_with_progress(args, mesh)
        job = Job(
            model=model,
            written=written,
            prompts=[encode(model, prompt, args.chat) for prompt in written],
            sampling=sampling,
            seed=seed,
            args=args,
            check_interrupt=check_interrupt,
        )
        warn_of_control(model, written, args.chat)
        mode = serve_file if args.file else search_beams if args.beams else continue_prompts
        return mode(job)


def load_with_progress(args: argparse.Namespace, mesh: Mesh | None) -> Model:
    """Load the model with a progress bar, or with one line if stderr is not a terminal."""
    name, began = args.model, perf_counter()
    try:
        with progress("loading") as on_progress:
            options = {"mesh": mesh, "rules": RULES, "progress": on_progress}
            options |= {"dtype": jnp.dtype(args.dtype), "cache_dtype": args.cache_dtype}
            options["rotate"] = args.rotate
            model = load(name, **options)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}.") from error
    if model.encoder is not None:
        raise InputError(
            f"{name} has an encoder, which the command line does not support; run it from Python: "
            "jaxkv.encode(model.encoder, ...), then prefill and decode."
        )
    jax.block_until_ready(model.params)
    kind = f"{model.checkpoint.architecture}, {model.size / 1e6:.1f}M weights in {args.dtype}"
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    note(f"loaded {name} ({kind}, {megabytes(size)}) in {perf_counter() - began:.1f} s")
    if mesh is not None:
        note_shares(model)
    return model
