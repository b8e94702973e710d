"""Check decoding and training on a GPU and measure them: `python scripts/gpu_check.py [--json FILE]`.

Needs an NVIDIA GPU and `draftsmith` on the path (after `make setup`, or with PYTHONPATH set to a folder with a link
`draftsmith` to the checkout); of its requirements torch, transformers, safetensors and Triton are enough. Nothing is
downloaded. Prints a table; takes minutes, most of it compilation.

| section | question |
|---|---|
| attention, verification, compaction | do the kernels give what formulas in fp64 and the PyTorch twins give? |
| models | do whole models of several architectures read trees right, and answer the same with and without drafts? |
| speed | how long does attention take, beside SDPA with a mask and FlexAttention, and as a share of copy bandwidth? |
| step | how long is a decoding step beside the bare target pass over the same rows, launched and as a CUDA graph? |
| training | are a head's gradients those of fp64, and how fast does one in the shape of Qwen3-8B's train? |

Exit status: 0 all holds, 1 something failed, or an aim was missed or not measured in full ("unchecked"), 2 there is no
GPU. `--dry-run` runs the same code with tiny shapes on a CPU, the kernels in Triton's interpreter: it says whether this
script works, nothing about speed; what needs CUDA says so and changes no status.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from gpu_report import INFO, Report, missing


def main() -> int:
    """Run the sections and print the table; the exit status."""
    parser = argparse.ArgumentParser(description="Check and measure decoding and training on a GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    if (status := missing("gpu_check", options.dry_run)) is not None:
        return status
    return run(options.json, options.dry_run)


def run(json_file: Path | None, dry_run: bool) -> int:
    """All sections on the GPU, or tiny ones on the CPU."""
    import gpu_numerics
    import gpu_speed
    import gpu_steps
    import gpu_training
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()

    device = torch.device("cpu" if dry_run else "cuda")
    report = Report()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton")}
    machine = "CPU (dry run)" if dry_run else torch.cuda.get_device_name(device)
    report.add("machine", machine, INFO, ", ".join(f"{k} {v}" for k, v in versions.items()), **versions)
    sizes = gpu_speed.TINY if dry_run else gpu_speed.FULL
    with torch.inference_mode():
        with report.section("attention"):
            gpu_numerics.check_attention(report, device, sizes)
        with report.section("verification"):
            gpu_numerics.check_verification(report, device, sizes)
        with report.section("compaction"):
            gpu_numerics.check_compaction(report, device, sizes)
        with report.section("models"):
            gpu_steps.check_models(report, device)
    with torch.no_grad(), report.section("speed"):
        gpu_speed.measure(report, device, sizes)
    gpu_speed.note_peak(report, device, "peak memory of speed")
    with report.section("step"):
        gpu_steps.measure(report, device, sizes)
    gpu_speed.note_peak(report, device, "peak memory of step")
    with report.section("training"):
        gpu_training.measure(report, device, gpu_training.TINY if dry_run else gpu_training.full())
    print(report.table())
    if json_file is not None:
        report.save(json_file, machine=machine, versions=versions, dry_run=dry_run)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
