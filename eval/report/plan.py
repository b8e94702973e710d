"""A plan as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """All of a plan, section by section; the first three say what it costs."""
    return [
        *_summary(plan),
        *_disk(plan["disk"]),
        *_memory(plan["memory"], plan["hardware"]),
        *_hours(plan["hours"], plan["model"], plan["hardware"]),
        *_decoding(plan["decoding"]),
        *_serving(plan["serving"], plan["decoding"], plan["hardware"]),
    ]


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print it on standard output."""
    print("\n".join(plan_lines(plan)))


def check_lines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `plan.check_against` found, a line for each figure."""
    out = [f"{'':20} {'planned':>10} {'measured':>10} {'ratio':>6}"]
    for line in lines:
        show = (lambda x: f"{x:.1f} s") if line["what"].startswith("time") else size
        planned = "-" if line["predicted"] is None else show(line["predicted"])
        verdict = f"within {line['bound']:.0%}" if line["within"] else f"OUTSIDE {line['bound']:.0%}"
        out.append(f"{line['what']:20} {planned:>10} {show(line['real']):>10} {line['ratio']:6.2f}   {verdict}")
    return out


def size(count: float) -> str:
    """Bytes as people write them, in powers of ten: 32.8 kB, 21.5 TB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _summary(plan: Mapping[str, Any]) -> list[str]:
    model, head, hardware, data = plan["model"], plan["head"], plan["hardware"], plan["data"]
    disk = plan["disk"]
    return [
        f"{head['name']} ({head['params'] / 1e6:,.1f}M, draft vocabulary {head['draft_vocab']:,}) for {model['name']} "
        f"({model['params'] / 1e9:.2f}B) on {hardware['devices']} × {hardware['name']}",
        f"data      {data['documents']:,} conversations, {data['tokens']:,} tokens, {data['supervised']:.0%} of the "
        f"rows supervised ({data['counted']})",
        f"needs     {size(disk['storages'][disk['choice']]['all'])} of disk ({disk['choice']}), "
        f"{size(plan['memory']['train']['zero0'])} a device to train, {_clock(plan['hours']['train'])} for "
        f"{plan['hours']['epochs']} epochs",
    ]


def _disk(disk: Mapping[str, Any]) -> list[str]:
    budget = disk["budget"]
    lines = ["", "features on disk" + ("" if budget is None else f", budget {size(budget)}")]
    for name, s in disk["storages"].items():
        verdict = "" if budget is None else "   fits" if s["all"] <= budget else "   too large"
        lines.append(f"  {name:10} {size(s['row']):>10} a token {size(s['all']):>12} in all{verdict}")
    return [*lines, f"  choose {disk['choice']}"]


def _memory(memory: Mapping[str, Any], hardware: Mapping[str, Any]) -> list[str]:
    lines = ["", f"memory of a device ({size(hardware['memory'])})"]
    for stage in ("regenerate", "collect"):
        found = memory[stage]
        host = f"; host {size(found['host'])}" if found["host"] else ""
        lines.append(f"  {stage:10} {size(found['all']):>10}  {_fits(found['fits'])}: {_parts(found['bytes'])}{host}")
    train = memory["train"]
    lines.append(f"  {'train':10} {size(train['zero0']):>10}  {_fits(train['fits'])}: {_parts(train['bytes'])}")
    stages = ", ".join(f"{i}: {size(train[f'zero{i}'])}" for i in range(4))
    by_stage = f"by ZeRO stage {stages}; " if hardware["devices"] > 1 else ""
    lines.append(f"             {by_stage}online {size(train['online'])}, {_fits(train['fits_online'])}")
    if train["without_decoding"] < train["zero0"]:
        without = f"{size(train['without_decoding'])} without decoded validation (train.decode_documents=0)"
        lines.append(f"{'':13}{without}")
    return lines


def _hours(hours: Mapping[str, Any], model: Mapping[str, Any], hardware: Mapping[str, Any]) -> list[str]:
    lines = ["", f"hours on {hardware['devices']} × {hardware['name']}"]
    needs = f"a copy of the target needs {model['devices_a_copy']} devices"
    if hours["regenerate"] is None:
        lines.append(f"  regenerate  impossible: {needs}")
    else:
        how = "given" if hours["measured"] else "roofline"
        how += f"; through servers: {needs}" if hours["through_servers"] else ""
        lines.append(f"  regenerate {_clock(hours['regenerate']):>10}  {hours['tokens_per_s']:,.0f} tokens/s ({how})")
    if hours["collect"] is None:
        lines.append(f"  collect     impossible: {needs}, and collecting runs on one")
    else:
        own = "a pass of its own; nothing where answers are decoded here"
        lines.append(f"  collect    {_clock(hours['collect']):>10}  {own}")
    lines.append(
        f"  train      {_clock(hours['train']):>10}  {hours['epochs']} epochs, {hours['steps']:,} steps, "
        f"{_clock(hours['optimizer'])} of it in the optimizer"
    )
    if hours["online"] is not None:
        lines.append(f"  online     {_clock(hours['online']):>10}  training with the target's pass in every epoch")
    return lines


def _decoding(d: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"decoding, batch {d['batch']}, context {d['context']:,}: bound by {d['bound']}, {d['step_ms']:.2f} ms a pass",
        f"  {size(d['bytes_a_token'])} and {d['flops_a_token'] / 1e9:,.2f} GFLOP a token: {d['intensity']:,.1f} FLOP a "
        f"byte, the device's ridge is {d['ridge']:,.1f}",
        f"  a pass over {d['free_rows']:,} rows a sequence costs no more than over 1",
        f"  speed-up by α and K, r = {d['r']:.1f} ({'given' if d['r_given'] else 'roofline'})",
        "     α   " + "".join(f"{f'K={k}':>7}" for k in d["depths"]) + "   best",
    ]
    for line in d["table"]:
        lines.append(
            f"  {line['alpha']:.2f}   " + "".join(f"{s:7.2f}" for s in line["speedups"])
            + f"   K={line['best_depth']}: {line['best']:.2f}×"
        )  # fmt: skip
    return lines


def _serving(s: Mapping[str, Any] | None, d: Mapping[str, Any], hardware: Mapping[str, Any]) -> list[str]:
    if s is None:
        return []
    parts = {name: x for name, x in s["bytes"].items() if name != "all"}
    share = f"gpu_memory_utilization at least {s['utilization']:.2f}" if s["utilization"] else "too much for the device"
    return [
        "",
        f"serving {d['batch']} sequences of {d['context']:,} on {s['devices']} × {hardware['name']}: "
        f"{size(s['bytes']['all'])} a device, {share}",
        f"  {_parts(parts)}",
        f"  {s['sequences']:,} sequences fit with the head, {s['sequences_without_head']:,} without",
    ]


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size(x)}" for name, x in parts.items() if x)


def _fits(fits: bool) -> str:
    return "fits" if fits else "TOO LARGE"


def _clock(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
