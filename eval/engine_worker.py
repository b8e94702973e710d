"""One job inside an engine's own environment: a program by itself, which imports nothing of this package.

    python engine_worker.py JOB.json RESULT.json

`serve_check.py` writes the job, {"do": name in JOBS, ...}, and reads the result.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Decode prompts one after the other in vLLM, greedily.

    Args:
        job: model, dtype, max_model_len, speculative (vLLM's `speculative_config`, or None), prompts (token ids),
            max_new_tokens, stop (token ids).

    Returns:
        tokens of each answer, seconds of all (prefill included), version, and of speculation: drafts, accepted,
        accepted_by_depth.
    """
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"], max_num_seqs=1, seed=0,
        enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False,
        distributed_executor_backend="uni", speculative_config=job["speculative"],
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop"])
    short = vllm.SamplingParams(temperature=0, max_tokens=8)
    llm.generate([{"prompt_token_ids": job["prompts"][0]}], short, use_tqdm=False)  # first passes are slow
    before = _counters(llm)
    tokens, started = [], time.perf_counter()
    for prompt in job["prompts"]:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        tokens.append(list(answer.outputs[0].token_ids))
    seconds = time.perf_counter() - started
    after = _counters(llm)
    drafts, accepted, depths = (
        after["drafts"] - before["drafts"],
        after["accepted"] - before["accepted"],
        [a - b for a, b in zip(after["depths"], before["depths"] or [0] * len(after["depths"]), strict=True)],
    )
    return {
        "tokens": tokens, "seconds": seconds, "version": vllm.__version__,
        "drafts": drafts, "accepted": accepted, "accepted_by_depth": depths,
    }  # fmt: skip


def _counters(llm: Any) -> dict[str, Any]:
    """What vLLM has counted so far; zeros without speculation."""
    found = {metric.name: metric for metric in llm.get_metrics()}

    def value(name: str) -> int:
        return int(getattr(found.get(f"vllm:spec_decode_num_{name}"), "value", 0))

    depths = getattr(found.get("vllm:spec_decode_num_accepted_tokens_per_pos"), "values", [])
    return {"drafts": value("drafts"), "accepted": value("accepted_tokens"), "depths": [int(n) for n in depths]}


def convert(job: dict[str, Any]) -> dict[str, Any]:
    """Let speculators load a checkpoint in its own layout, and convert one in the portable layout into its own.

    Args:
        job: own (folder in speculators' layout), portable (folder), converted (where to), target, layer_ids.

    Returns:
        version, and the names of tensors whose values differ between `own` and what speculators holds of it.
    """
    convert_model: Any = importlib.import_module("speculators.convert").convert_model
    model_class: Any = importlib.import_module("speculators").SpeculatorModel
    safe_open: Any = importlib.import_module("safetensors").safe_open
    torch: Any = importlib.import_module("torch")
    model = model_class.from_pretrained(job["own"], attn_implementation="eager")
    held, differing = model.state_dict(), []
    with safe_open(str(Path(job["own"], "model.safetensors")), "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - no mapping
            wanted = stored.get_tensor(name)
            if name not in held or not torch.equal(held[name].to(wanted.dtype), wanted):
                differing.append(name)
    convert_model(
        job["portable"], job["target"], "eagle3", output_path=job["converted"], validate_device="cpu",
        eagle_aux_hidden_state_layer_ids=job["layer_ids"],
    )  # fmt: skip
    version = importlib.import_module("importlib.metadata").version("speculators")
    return {"version": version, "differing": differing}


JOBS = {"serve": serve, "convert": convert}


def main() -> None:
    """Do the job that the first argument names, write what came of it where the second one says."""
    job = json.loads(Path(sys.argv[1]).read_text())
    result = JOBS[job["do"]](job)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
