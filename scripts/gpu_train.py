"""Train the default target's EAGLE-3 head on a GPU: `python scripts/gpu_train.py --target FOLDER --out OUT`.

For a machine with an NVIDIA GPU that is borrowed for minutes and has no network: of draftsmith's requirements torch,
transformers, safetensors, PyYAML and Triton are enough. The target answers the project's own prompts in large batches,
greedily first, then again and again at a temperature. The head learns from these answers, with the target's states
computed anew in each step. Then it is measured on held-out prompts.

`--minutes` is what the whole run should take: answers and training end when 60 % of it are over, each after half of
that. Measuring takes an estimated three to four minutes on an H200, whatever is left, and nothing cuts it off. It
begins with tau, written to OUT/report.json at once, and the journal keeps what is finished: the same command goes on
with measuring where one that was killed stopped. The head is saved when training is over, nothing before that.

Where the target comes from: on a machine with a network and draftsmith installed,

    python -c "from draftsmith.heads.resolve import resolve_target as r; print(r('smollm2-135m').location)"

fetches it and prints its folder. Copy that folder as it is, byte by byte: its fingerprint goes into the head, which
later loads with no other. Where only small files can be copied, `split -b 48M model.safetensors part-` there and
`cat part-* > model.safetensors` here give the same file.

What comes out, every file below 16 MiB (the head in bf16):

    OUT/best/           the head as any checkpoint has it; validation.json says how it was trained
    OUT/report.json     tau and speed-up on held-out prompts on this device, with all raw logs; at first tau alone
    OUT/journal.jsonl   what is measured so far
    OUT/metrics.jsonl   loss and acceptance over the steps

To measure it elsewhere: copy OUT/best to runs/smollm2-135m/eagle3@gpu/train/checkpoints/best and run
`draftsmith eval --run gpu`, or `draftsmith generate --head eagle3 --run gpu "..."`.

Exit status: 0 trained and measured, 1 an error, or outputs with the head that aren't the target's own, 2 there is no
GPU. `--dry-run` goes the same way in a minute on a CPU, with few prompts, steps and tokens, counted ones whatever
`--minutes` says, and with whatever chat model the folder holds; it says whether this script works, nothing about speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_report import missing


def main() -> int:
    """Check what is there and run; the exit status."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="FOLDER", help="the target's model folder")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="gets the head and its report")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run, see above (default: 8)")
    parser.add_argument("--dry-run", action="store_true", help="few prompts, steps and tokens on a CPU")
    options = parser.parse_args()
    if (status := missing("gpu_train", options.dry_run)) is not None:
        return status
    from gpu_head import run

    from draftsmith.errors import DraftsmithError

    try:
        return run(options.target, options.out, started, options.minutes * 60, options.dry_run)
    except DraftsmithError as error:
        print(f"gpu_train: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
