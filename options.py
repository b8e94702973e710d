"""What the commands are called, what they do, and what their options take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# What an option takes, and its default. Every command has those that its row in COMMANDS names.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "prompt": (Annotated[str, typer.Argument(help="What the user says; - reads standard input.")], "-"),
    "bench": (
        Annotated[str, typer.Argument(help="What to measure: decoder, data or train.", metavar="[NAME]")],
        "decoder",
    ),
    "overrides": (
        Annotated[list[str] | None, typer.Argument(help="KEY=VALUE, the same as --set.", metavar="[KEY=VALUE]...")],
        None,
    ),
    "model": (
        Annotated[str | None, typer.Option(help="Target: a short name, a hub id or a folder.  [smollm2-135m]")],
        None,
    ),
    "head": (Annotated[str | None, typer.Option(help="Kind of draft head.  [eagle3]")], None),
    "head_init": (
        Annotated[
            str | None,
            typer.Option(
                help="A trained head to start from: a checkpoint or run folder, a hub id, or native (the target's own)."
            ),
        ],
        None,
    ),
    "recipe": (
        Annotated[
            str | None, typer.Option(help="Where prompts come from: a name, or a .yaml of yours.  [the target's own]")
        ],
        None,
    ),
    "data": (
        Annotated[
            Path | None,
            typer.Option(
                help="Instead of a recipe: a file or folder of your own conversations, hf:DATASET or a named source."
            ),
        ],
        None,
    ),
    "answers": (
        Annotated[
            str | None,
            typer.Option(
                help="Whose answers to train on: target (its own) or dataset (the data's).  [auto: what fits]"
            ),
        ],
        None,
    ),
    "mode": (
        Annotated[
            str | None,
            typer.Option(help="States of the target: offline (stored) or online (computed in training).  [auto]"),
        ],
        None,
    ),
    "server": (
        Annotated[
            str | None,
            typer.Option(help="OpenAI-compatible servers that answer instead of this machine: URL[,URL]."),
        ],
        None,
    ),
    "source": (
        Annotated[
            str | None,
            typer.Option(
                help="A file, a folder, hf:DATASET or a named source to look at, with its own answers unless --answers "
                "says target."
            ),
        ],
        None,
    ),
    "report": (
        Annotated[bool, typer.Option("--report", help="Only count what is kept, changed and dropped, by reason.")],
        False,
    ),
    "show": (
        Annotated[int | None, typer.Option(min=1, help="Only print so many samples, what is learned in colour.")],
        None,
    ),
    "verify": (
        Annotated[bool, typer.Option("--verify", help="Only read all features and compare their checksums.")],
        False,
    ),
    "size": (Annotated[int | None, typer.Option(min=1, help="Of the vocabulary.  [several]")], None),
    "conversations": (Annotated[int | None, typer.Option(min=1, help="How many.  [the recipe's]")], None),
    "tokens": (Annotated[int | None, typer.Option(min=2, help="Of a conversation.  [published means]")], None),
    "answer_share": (
        Annotated[float | None, typer.Option(min=0, max=1, help="Share of the tokens that is answers.")],
        None,
    ),
    "epochs": (Annotated[int | None, typer.Option(min=1, help="Of training.  [the head's]")], None),
    "hardware": (
        Annotated[str | None, typer.Option(help="A name from configs/hardware.yaml, or here (this machine).  [here]")],
        None,
    ),
    "nodes": (Annotated[int | None, typer.Option(min=1, help="Machines.  [1]")], None),
    "planned_gpus": (Annotated[int | None, typer.Option("--gpus", min=1, help="Devices of a machine.  [1]")], None),
    "check": (
        Annotated[
            Path | None,
            typer.Option(
                help="A finished run (runs/MODEL/HEAD): compare what is predicted for it with what it measured."
            ),
        ],
        None,
    ),
    "disk_budget": (Annotated[str | None, typer.Option(help="Bytes for features, like 500GB.")], None),
    "gpu_memory": (Annotated[str | None, typer.Option(help="Bytes of a device, like 75GiB.  [its own]")], None),
    "tokens_per_s": (
        Annotated[float | None, typer.Option(help="Measured decoding rate of all machines.  [a roofline]")],
        None,
    ),
    "batch": (Annotated[int | None, typer.Option(min=1, help="Sequences while serving.  [8]")], None),
    "context": (Annotated[int | None, typer.Option(min=1, help="Tokens of each while serving.  [2048]")], None),
    "alpha": (Annotated[float | None, typer.Option(min=0, max=0.999, help="Acceptance of a draft.  [0.7]")], None),
    "r": (
        Annotated[float | None, typer.Option("--r", help="Seconds of a target pass / of a draft step.  [a roofline]")],
        None,
    ),
    "counted": (
        Annotated[Path | None, typer.Option("--data", help="A runs/…/data/… folder whose counts are taken.")],
        None,
    ),
    "minutes": (Annotated[float | None, typer.Option(min=0.01, help="Time budget.")], None),
    "gpus": (Annotated[int | None, typer.Option(min=1, help="Devices on this machine.  [all visible]")], None),
    "nnodes": (Annotated[int | None, typer.Option("--nnodes", min=1, help="Machines in all.  [1]")], None),
    "node_rank": (Annotated[int | None, typer.Option(min=0, help="Number of this machine, from 0.  [0]")], None),
    "master": (Annotated[str | None, typer.Option(help="Host of machine 0; needed with several machines.")], None),
    "run": (Annotated[str | None, typer.Option(help="Name of the run, to keep several heads of one kind.")], None),
    "runs": (Annotated[Path | None, typer.Option(help="Folder that holds all runs.  [runs]")], None),
    "config": (Annotated[Path | None, typer.Option(help="YAML file with any part of the configuration.")], None),
    "set_": (
        Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, e.g. train.token_budget=2048; may repeat.")],
        None,
    ),
    "dry_run": (
        Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration as YAML and stop.")],
        False,
    ),
    "drafter": (
        Annotated[
            str | None,
            typer.Option(help="plain, prompt-lookup, lookahead, draft-model or head (a trained one).  [head]"),
        ],
        None,
    ),
    "draft_model": (
        Annotated[str | None, typer.Option(help="Small model of the same tokenizer, named like --model.")],
        None,
    ),
    "tree": (
        Annotated[
            str | None,
            typer.Option(
                help="chain:4, static:0,1,0.0, dynamic:10x6x60, or own:16, the tree measured for the head.  [a head's: "
                "the one its report chose; else chain:4]"
            ),
        ],
        None,
    ),
    "heads": (
        Annotated[str | None, typer.Option(help="Names of heads (HEAD or HEAD@RUN), with commas between.  [all]")],
        None,
    ),
    "prompts": (Annotated[int | None, typer.Option(min=1, help="Held-out prompts.  [8]")], None),
    "answer_tokens": (
        Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer.  [64]")],
        None,
    ),
    "with_union": (
        Annotated[
            bool, typer.Option("--with-prompt-lookup", help="Also join looked-up drafts to the fastest head's trees.")
        ],
        False,
    ),
    "train_minutes": (
        Annotated[float | None, typer.Option("--minutes", min=0.01, help="Training of each.  [4]")],
        None,
    ),
    "with_prompt_lookup": (
        Annotated[bool, typer.Option("--with-prompt-lookup", help="Add what Prompt Lookup finds to every tree.")],
        False,
    ),
    "temperature": (Annotated[float | None, typer.Option(min=0, help="0 = greedy.  [0]")], None),
    "top_k": (Annotated[int | None, typer.Option(min=0, help="Keep the k most likely tokens.  [all]")], None),
    "top_p": (Annotated[float | None, typer.Option(min=0, max=1, help="Keep this mass of tokens.  [1]")], None),
    "min_p": (
        Annotated[float | None, typer.Option(min=0, max=1, help="Keep tokens so likely, × the best.  [0]")],
        None,
    ),
    "repetition_penalty": (Annotated[float | None, typer.Option(help="Of tokens already there.  [1 = none]")], None),
    "seed": (Annotated[int | None, typer.Option(help="Of the draws.  [0]")], None),
    "max_new_tokens": (Annotated[int | None, typer.Option(min=1, help="Longest answer.  [256, or what fits]")], None),
    "stop_token": (Annotated[list[str] | None, typer.Option(help="Text of a token that ends it; may repeat.")], None),
    "typical": (
        Annotated[bool, typer.Option("--typical", help="LOSSY: accept drafts that are merely typical of the target.")],
        False,
    ),
    "raw": (Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without a chat template.")], False),
    "json_": (
        Annotated[bool, typer.Option("--json", help="Print the result as JSON; standard output then holds it alone.")],
        False,
    ),
}
_STAGE = {
    "overrides",
    "model",
    "head",
    "recipe",
    "data",
    "answers",
    "server",
    "runs",
    "config",
    "set_",
    "dry_run",
    "json_",
}
_DEVICES = {"gpus", "nnodes", "node_rank", "master"}
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
COMMANDS: dict[str, tuple[str, set[str]]] = {
    "run": (
        "Do everything: prompts, answers, features, vocabulary, training, measurement, report. Goes on where it was.",
        {"minutes", "run", "mode", "head_init", *_DEVICES, *_STAGE},
    ),
    "prepare": (
        "Turn a recipe or your own data into prompts for the target; --report and --show only look.",
        {"source", "report", "show", *_STAGE},
    ),
    "regenerate": (
        "Let the target answer the prompts, and keep its states on the way.",
        {"minutes", "mode", "head_init", *_STAGE},
    ),
    "collect": (
        "Compute the target's states for answers that have none yet, and count the tokens of the draft vocabulary.",
        {"verify", "minutes", "mode", "head_init", *_STAGE},
    ),
    "vocab": (
        "Show what draft vocabularies cover of the answers, by source and script.",
        {"size", *_STAGE - {"answers", "server"}},
    ),
    "plan": (
        "Say what a run needs before it starts: tokens, disk, memory, hours, and the speed-up to hope for.",
        {"overrides", "recipe", "config", "model", "head", "conversations", "tokens", "answer_share", "counted",
         "epochs", "hardware", "planned_gpus", "check",
         "nodes", "disk_budget", "gpu_memory", "tokens_per_s", "batch", "context", "alpha", "r", "json_"},
    ),
    "train": (
        "Train the head on collected features; here --minutes is the time of training alone.",
        {"minutes", "run", "mode", "head_init", *_DEVICES, *_STAGE},
    ),
    "eval": (
        "Measure a trained head: acceptance, speed-up over plain decoding, output check (80 prompts × 128 tokens).",
        {"run", *_STAGE},
    ),
    "generate": (
        "Answer a prompt with any drafting scheme, streamed; what the target says stays the same, it comes faster.",
        {"prompt", "model", "drafter", "head", "run", "runs", "draft_model", "tree", "with_prompt_lookup", *SAMPLING,
         "max_new_tokens", "stop_token", "typical", "raw", "json_"},
    ),
    "compare": (
        "Decode the same prompts with every trained head and every scheme without training, in turns: one table.",
        {"model", "runs", "heads", "prompts", "answer_tokens", "draft_model", "with_union", "json_"},
    ),
    "tour": (
        "Train every head family for a few minutes on the same answers, then compare them. Goes on where it was.",
        {"overrides", "model", "recipe", "train_minutes", "heads", "gpus", "runs", "set_", "json_"},
    ),
    "bench": (
        "Measure decoder (against transformers.generate), data or train, in turns; writes RUNS/bench/NAME.json.",
        {"bench", "overrides", "model", "runs", "json_"},
    ),
}  # fmt: skip
