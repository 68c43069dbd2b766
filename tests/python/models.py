"""Small models of the kinds that people train, with their data."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        split = [m(h).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.query, self.key, self.value)]
        h = F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out_proj(h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding and head are one tensor. `recompute`: None, "reentrant" or "hooks"."""

    vocabulary = 200

    def __init__(self, width: int = 96, layers: int = 3, recompute: str | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute is not None and self.training:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        before = 3
        for channels in (32, 64, 64, 64):
            self.layers.append(nn.Sequential(nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()))
            before = channels
        self.head = nn.Linear(before, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 96)
        self.first = nn.LSTM(96, 96, batch_first=True)
        self.second = nn.LSTM(96, 96, batch_first=True)
        self.head = nn.Linear(96, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h, _ = self.first(self.embedding(tokens))
        h, _ = self.second(h)
        return self.head(h[:, -1])


class Bags(nn.Module):
    """Embeddings and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(700, 64) for _ in range(4))
        self.head = nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(sum(table(tokens).mean(1) for table in self.tables))


def batch(model: nn.Module, step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step; the same for the same step, whatever was drawn before."""
    draw = torch.Generator().manual_seed(1000 + step)
    if isinstance(model, Transformer):
        tokens = torch.randint(model.vocabulary, (rows, 9), generator=draw)
        return tokens[:, :-1], tokens[:, 1:]
    targets = torch.randint(16, (rows,), generator=draw)
    if isinstance(model, Convolution):
        return torch.randn(rows, 3, 8, 8, generator=draw), targets
    if isinstance(model, Recurrent):
        return torch.randint(400, (rows, 6), generator=draw), targets
    if isinstance(model, Bags):
        return torch.randint(700, (rows, 6), generator=draw), targets
    return torch.randn(rows, 128, generator=draw), targets


def loss_of(model: nn.Module, step: int, rows: int = 4) -> torch.Tensor:
    inputs, targets = batch(model, step, rows)
    outputs = model(inputs)
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


MODELS = {"transformer": Transformer, "mlp": Mlp, "convolution": Convolution, "lstm": Recurrent, "embedding": Bags}
