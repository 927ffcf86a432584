"""The lines of code that do what the planner assumes of a training step, for modules with the names of Llama's."""

from __future__ import annotations

from .memory import Switches
from .ways import Problem, Verdict


def lines(problem: Problem, verdict: Verdict) -> list[str]:
    """Return them for a way: imports, what is done to a ``model`` before training, and the loss in its forward."""
    row, s, machines = verdict.way.row, verdict.way.switches, problem.cluster
    flow = "ring" if row.dataflow.endswith("ring") else "gather"
    local = f", local_size={row.ranks}" * (row.dataflow == flow and row.hosts > 1)  # not by node
    buffer = f", buffer_bytes={s.buffer_bytes}" * (s.buffer_bytes != Switches.buffer_bytes)
    how = "inputs=host" * (s.host_bytes > 0) + ", attention=host" * (s.host_bytes > 0 and s.attention_on_host)
    how += (", " * bool(how) + "results=0") * (not s.keep_attention_out)
    offload = ", offload_policy=CPUOffloadPolicy()" * (s.optimizer == "host")
    chunked = s.loss_chunk > 0
    imported = ["HostMemory"] * (s.host_bytes > 0) + ["Recompute"]
    imported += ["by_heads"] * (s.head_groups > 1) + ["by_tokens"] * (s.mlp_chunk > 0) + ["recompute"]
    code = [
        "import torch, ringattn",
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {'CPUOffloadPolicy, ' * bool(offload)}fully_shard",
        f"from ringattn.training import {', '.join(imported)}",
        f'mesh = init_device_mesh("cuda", ({machines.gpus // row.ranks}, {row.ranks}), mesh_dim_names=("rows", "cp"))',
        f'plan = ringattn.plan({problem.context}, mesh["cp"], causal=True, dataflow="{flow}"{local}{buffer})',
        "model.to(torch.bfloat16)",
    ]
    if s.head_groups > 1 or s.mlp_chunk:
        code.append("for layer in model.layers:")
    if s.head_groups > 1:
        code.append(f"    by_heads(layer.self_attn, {s.head_groups})")
    if s.mlp_chunk:
        code.append("    for part in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):")
        code.append(f"        by_tokens(part, {s.mlp_chunk})")
        code.append(f"by_tokens(model.norm, {s.mlp_chunk})")
    if s.host_bytes:
        code.append(f"host = HostMemory({s.host_bytes})")
    code += [
        f"recompute(model.layers, Recompute({how}))",
        'everyone = mesh["rows", "cp"]._flatten()',
        f"for module in (*model.layers, model): fully_shard(module, mesh=everyone{offload})",
    ]
    if s.optimizer in ("adamw_bf16", "host"):
        code.append("optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))")
    in_forward = (
        'ringattn.loss.linear_cross_entropy(hidden, self.lm_head.weight, shift_labels, everyone, wrapper="averages", '
        f"chunk={s.loss_chunk})"
        if chunked
        else 'ringattn.loss.cross_entropy(self.lm_head(hidden), shift_labels, everyone, wrapper="averages")'
    )
    return [*code, f"# in the model's forward: loss = {in_forward}"]
