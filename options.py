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
    "any_head": (
        Annotated[
            str | None,
            typer.Option("--head", help="Kind of draft head, or the folder of a trained one, wherever from.  [eagle3]"),
        ],
        None,
    ),
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
        Annotated[bool, typer.Option("--dry-run", help="Print the settings as YAML and stop.")],
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
    "benchmarks": (
        Annotated[
            str | None,
            typer.Option(
                "--bench",
                help="What to decode, with commas between: builtin, mt-bench, spec-bench, …, or a .jsonl of yours.  "
                "[builtin]",
            ),
        ],
        None,
    ),
    "bench_dir": (
        Annotated[str | None, typer.Option(help="Folder with benchmarks' files; else BENCH_DIR, else the hub.")],
        None,
    ),
    "bench_prompts": (
        Annotated[int | None, typer.Option("--prompts", min=1, help="Prompts of each benchmark.  [80]")],
        None,
    ),
    "temperatures": (
        Annotated[
            list[float] | None,
            typer.Option("--temperature", min=0, help="Measure at this temperature, too; may repeat.  [0 alone]"),
        ],
        None,
    ),
    "against": (
        Annotated[
            Path | None,
            typer.Option(help="An earlier report.json: exit 1 if τ or the speed-up has fallen below its noise."),
        ],
        None,
    ),
    "out": (Annotated[Path | None, typer.Option(help="Folder of the result.  [in the run's]")], None),
    "batches": (
        Annotated[str | None, typer.Option(help="Sequences at a time, with commas between.  [1,2,4,8]")],
        None,
    ),
    "load_prompts": (
        Annotated[int | None, typer.Option("--prompts", min=1, help="Prompts of each benchmark.  [8]")],
        None,
    ),
    "tune_temperatures": (
        Annotated[str | None, typer.Option("--temperatures", help="0 = greedy; several with commas between.  [0]")],
        None,
    ),
    "trees": (
        Annotated[
            list[str] | None,
            typer.Option("--tree", help="A setting to choose from, e.g. chain:4; may repeat.  [a grid of them]"),
        ],
        None,
    ),
    "replay": (
        Annotated[
            Path | None,
            typer.Option(help="Instead: a .jsonl of requests as OpenAI's API takes them, decoded in a closed loop."),
        ],
        None,
    ),
    "concurrency": (
        Annotated[int | None, typer.Option(min=1, help="Requests of --replay at a time.  [8]")],
        None,
    ),
    "heads": (
        Annotated[str | None, typer.Option(help="Names of heads (HEAD or HEAD@RUN), with commas between.  [all]")],
        None,
    ),
    "answer_tokens": (
        Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer.  [64]")],
        None,
    ),
    "with_union": (
        Annotated[
            bool,
            typer.Option(
                "--with-prompt-lookup",
                help="Also join looked-up drafts to the trees of the fastest head and lookahead.",
            ),
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
    "template_args": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--template-arg",
                help="NAME=VALUE for the chat template, e.g. enable_thinking=false; may repeat.  [as in the head's "
                "report]",
            ),
        ],
        None,
    ),
    "stop_token": (Annotated[list[str] | None, typer.Option(help="Text of a token that ends it; may repeat.")], None),
    "typical": (
        Annotated[bool, typer.Option("--typical", help="LOSSY: accept drafts that are merely typical of the target.")],
        False,
    ),
    "with_plain": (
        Annotated[bool, typer.Option("--plain/--no-plain", help="Then decode the prompt plainly, too, to compare.")],
        True,
    ),
    "color": (
        Annotated[
            bool | None,
            typer.Option("--color/--no-color", help="Show how each token came.  [on terminals without NO_COLOR]"),
        ],
        None,
    ),
    "raw": (Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without a chat template.")], False),
    "served_prompts": (
        Annotated[int | None, typer.Option("--prompts", min=1, help="Held-out prompts.  [20]")],
        None,
    ),
    "depth": (Annotated[int | None, typer.Option(min=1, help="Drafted tokens a step, K.  [3]")], None),
    "threads": (Annotated[int | None, typer.Option(min=1, help="Of the engine and of the decoder here.  [1]")], None),
    "engines_folder": (
        Annotated[Path | None, typer.Option("--engines", help="Where 'make engines' put them.  [.engines]")],
        None,
    ),
    "exported_run": (
        Annotated[
            Path,
            typer.Argument(help="A run's folder, runs/<model>/<head>, or a checkpoint's.", metavar="RUN"),
        ],
        ...,
    ),
    "engine": (
        Annotated[str, typer.Option(help="sglang, speculators, tensorrt-llm, tgi or vllm: see docs/engines.md.")],
        "vllm",
    ),
    "export_out": (
        Annotated[Path | None, typer.Option("--out", help="Folder to write.  [RUN/export/ENGINE]")],
        None,
    ),
    "export_dtype": (
        Annotated[str | None, typer.Option("--dtype", help="Of the weights: bf16, fp16 or fp32.  [bf16]")],
        None,
    ),
    "examined": (
        Annotated[
            Path,
            typer.Argument(help="An exported head, one from elsewhere, a checkpoint or a run's folder.", metavar="DIR"),
        ],
        ...,
    ),
    "target": (
        Annotated[
            str | None,
            typer.Option(help="The model that the head drafts for, named like --model.  [none: fewer checks]"),
        ],
        None,
    ),
    "pushed_folder": (
        Annotated[
            Path,
            typer.Argument(
                help="An exported head; or a run's folder, which is exported for vLLM first.", metavar="DIR"
            ),
        ],
        ...,
    ),
    "hub_name": (Annotated[str, typer.Argument(help="A model repository on the Hub.", metavar="me/Name")], ...),
    "public": (Annotated[bool, typer.Option("--public/--private", help="Who may read it.  [private]")], False),
    "revision": (Annotated[str | None, typer.Option(help="Branch, made where it isn't there yet.  [main]")], None),
    "message": (Annotated[str | None, typer.Option(help="Of the commit.  [what was pushed]")], None),
    "license": (
        Annotated[str | None, typer.Option(help="Licence on the card as the Hub writes it, e.g. apache-2.0.  [other]")],
        None,
    ),
    "push_dry_run": (
        Annotated[
            bool,
            typer.Option(
                "--dry-run", help="List files and sizes; the Hub isn't written to; a run's folder is exported first."
            ),
        ],
        False,
    ),
    "push": (
        Annotated[
            str | None, typer.Option(help="me/Name: then export the head and push it to the Hub, as `push` does.")
        ],
        None,
    ),
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
        {"minutes", "push", "run", "mode", "head_init", *_DEVICES, *_STAGE},
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
        {"run", "any_head", "benchmarks", "bench_dir", "bench_prompts", "temperatures", "against", "out",
         *_STAGE - {"head"}},
    ),
    "generate": (
        "Answer a prompt with any drafting scheme, streamed; what the target says stays the same, it comes faster.",
        {"prompt", "model", "drafter", "any_head", "run", "runs", "draft_model", "tree", "with_prompt_lookup",
         *SAMPLING, "max_new_tokens", "stop_token", "template_args", "typical", "raw", "with_plain", "color",
         "dry_run", "json_"},
    ),
    "load": (
        "Measure a head under load, against plain decoding: by batch, or with recorded requests. Goes on where it was.",
        {"model", "any_head", "run", "runs", "tree", "batches", "benchmarks", "bench_dir", "load_prompts",
         "answer_tokens", "template_args", "replay", "concurrency", "dry_run", "json_"},
    ),
    "tune": (
        "Find a head's best setting for every batch and temperature, and what engines must be told. Can be resumed.",
        {"model", "any_head", "run", "runs", "benchmarks", "bench_dir", "batches", "tune_temperatures", "load_prompts",
         "answer_tokens", "trees", "template_args", "dry_run", "json_"},
    ),
    "compare": (
        "Decode the same prompts with every trained head and every scheme without training, in turns: one table.",
        {"model", "runs", "heads", "benchmarks", "bench_dir", "load_prompts", "answer_tokens", "temperature",
         "draft_model", "with_union", "template_args", "dry_run", "json_"},
    ),
    "tour": (
        "Train every head family for a few minutes on the same answers, then compare them. Goes on where it was.",
        {"overrides", "model", "recipe", "train_minutes", "heads", "gpus", "push", "runs", "set_", "dry_run", "json_"},
    ),
    "serve-check": (
        "Serve the exported head in vLLM and compare outputs, acceptance and speed with the decoder here.",
        {"model", "head", "run", "runs", "served_prompts", "answer_tokens", "depth", "threads", "engines_folder",
         "dry_run", "json_"},
    ),
    "export": (
        "Write a trained head as an engine loads it, and print the command that serves it.",
        {"exported_run", "engine", "export_out", "export_dtype", "model", "json_"},
    ),
    "doctor": (
        "Say what is wrong with a head's directory and what engines make of it; with --target decode from it, too.",
        {"examined", "target", "runs", "json_"},
    ),
    "push": (
        "Send an exported head to the Hub with its card and report, in one commit; the next time only what changed.",
        {"pushed_folder", "hub_name", "target", "runs", "public", "revision", "message", "license", "push_dry_run",
         "json_"},
    ),
    "bench": (
        "Measure decoder (against transformers.generate), data or train, in turns; writes RUNS/bench/NAME.json.",
        {"bench", "overrides", "model", "runs", "dry_run", "json_"},
    ),
}  # fmt: skip
