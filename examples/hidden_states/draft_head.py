"""A draft head: from a language model's hidden states it guesses what the model will say one token later.

    states of token t, token t+1 -> one transformer block -> the model's own output layer -> guess of token t+2

A small form of EAGLE (arXiv 2401.15077): the head learns from cached states, and the model is not run. It is judged by
how often its first choice is the model's.
"""

import time

import torch
import torch.nn.functional as F
from cached_states import collate
from torch import nn
from torch.utils.data import DataLoader


class DraftHead(nn.Module):
    def __init__(self, model, num_values, num_heads=3):
        super().__init__()
        width = model.head.in_features
        self.model = [model]  # in a list: its weights are used and stay as they are
        self.fuse = nn.Linear(num_values + width, width)
        self.block = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, batch_first=True, norm_first=True)

    def forward(self, batch):
        """Logits (B, L-1, tokens): what the model would say after token t+1, of each t."""
        model = self.model[0]
        known = [batch["hidden_states"][:, :-1], model.embed(batch["input_ids"][:, 1:])]
        x = self.fuse(torch.cat(known, -1))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return model.head(model.norm(self.block(x, src_mask=mask, is_causal=True)))

    def targets(self, batch):
        """Logits (B, L-1, tokens) of the model itself, from its last hidden states; and which of them count."""
        model = self.model[0]
        return model.head(model.norm(batch["verifier_last_hidden_states"][:, 1:])), batch["loss_mask"][:, :-1].bool()


def train(model, dataset, *, num_steps, batch_size=32, lr=2e-3, seed=0, device="cpu"):
    """Train a head; returns it, and the seconds that reading took and that all took."""
    torch.manual_seed(seed)
    head = DraftHead(model, dataset[0]["hidden_states"].shape[1]).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, num_steps)
    batches = passes(dataset, batch_size, seed)
    started, read_s = time.perf_counter(), 0.0
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        read_s += time.perf_counter() - asked
        with torch.no_grad():
            said, counts = head.targets(batch)
        loss = F.cross_entropy(head(batch)[counts], said[counts].softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    return head.eval(), read_s, time.perf_counter() - started


def passes(dataset, batch_size, seed):
    """Batches of pass after pass, each in another order."""
    generator = torch.Generator().manual_seed(seed)
    batch_size = min(batch_size, len(dataset))
    while True:
        yield from DataLoader(
            dataset, batch_size, shuffle=True, drop_last=True, collate_fn=collate, generator=generator
        )


@torch.no_grad()
def agreement(head, dataset, device="cpu"):
    """Share of tokens where the head's first choice is that of the model."""
    right = total = 0
    for batch in DataLoader(dataset, 64, collate_fn=collate):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        said, counts = head.targets(batch)
        right += int((head(batch).argmax(-1) == said.argmax(-1))[counts].sum())
        total += int(counts.sum())
    return right / total
