# Look at: the adapters are added by peft as ever, then the model is spread; only they are trained.
# They are saved as peft saves them, and merge into the weights where they lie.
#
#     torchrun --standalone --nproc_per_node 2 examples/peft_lora.py

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import consistent
from consistent import S
from consistent.integrations.whole import whole


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    model = LlamaForCausalLM(
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    ).double()
    for layer in model.model.layers:  # peft starts with B = 0, and nothing would be seen at first
        layer.self_attn.q_proj.weight.data.mul_(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config).double()


def train(model: torch.nn.Module, spread) -> list[float]:
    """Losses of 6 steps, and of the merged model, whose numbers are those of the last."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    order, losses = torch.Generator().manual_seed(1), []
    for _ in range(6):
        ids = spread(torch.randint(40, (5, 9), generator=order))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses += [float(x.abs().sum()) for x in whole(get_peft_model_state_dict(model)).values()]
    ids = spread(torch.randint(40, (5, 9), generator=order))
    losses.append(model(input_ids=ids, labels=ids).loss.item())
    merged = model.merge_and_unload()
    losses.append(merged(input_ids=ids, labels=ids).loss.item())
    assert abs(losses[-1] - losses[-2]) < 1e-10, "the merged model is another one"
    return losses


def difference(plan: object = "zero3") -> float:
    """Between peft in this process and on all ranks."""
    placement = consistent.Placement.all("cpu")
    alone = train(build(), lambda x: x)
    shared = train(
        consistent.parallelize(build(), placement, plan),
        lambda x: consistent.distribute(x, placement, S(0)),
    )
    return max(abs(a - b) for a, b in zip(shared, alone, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gap = difference()
    if dist.get_rank() == 0:
        print(f"losses and adapters as in one process; largest difference: {gap:.1e}")
    dist.destroy_process_group()
