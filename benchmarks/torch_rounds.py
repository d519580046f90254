"""The torch contenders: rounds of FedAvg and AdaPeD as efficient PyTorch loops over clients, with tensors in memory.

As in jaxpfl, the losses of an AdaPeD step share forward passes. On a GPU, all tensors (even psi) stay on the GPU, so
nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

LR, LR_PSI, WEIGHT_DECAY, PSI, FLOOR, C = 0.1, 0.05, 1e-4, 3.5, 0.5, 5.0


class Net(nn.Module):
    """The papers' MNIST CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Clients:
    """Clients of one process: their data, and for AdaPeD their models."""

    def __init__(
        self,
        data: list[tuple[np.ndarray, np.ndarray]],
        steps: int,
        batch: int,
        channels_last: bool,
        device: str = "cpu",
    ):
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.device = device
        self.data = [
            (
                torch.from_numpy(x).to(device).permute(0, 3, 1, 2).contiguous(memory_format=layout),
                torch.from_numpy(y).to(device).long(),
            )
            for x, y in data
        ]
        self.steps, self.batch = steps, batch
        self.model, self.teacher = (
            Net().to(device).to(memory_format=layout)  # pyright: ignore[reportCallIssue]
            for _ in range(2)
        )
        self.thetas: list[list[torch.Tensor]] | None = None

    def batches(self, n: int) -> torch.Tensor:
        """Return the indices of a round's batches, [steps, batch]: whole epochs, each in a new random order."""
        used = self.steps * self.batch
        order = torch.cat([torch.randperm(n, device=self.device) for _ in range(-(-used // n))])
        return order[:used].view(self.steps, -1)

    def fedavg(self, mu: list[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
        """Return the sum of n_i (w_i - mu), and the sum of n_i."""
        params = list(self.model.parameters())
        total, weight = [torch.zeros_like(p) for p in mu], 0.0
        for x, y in self.data:
            _load(params, mu)
            for indices in self.batches(len(y)):
                loss = F.cross_entropy(self.model(x[indices]), y[indices])
                _step(params, torch.autograd.grad(loss, params))
            for t, p, m in zip(total, params, mu, strict=True):
                t.add_(p.detach() - m, alpha=len(y))
            weight += len(y)
        return total, weight

    def adaped(self, mu: list[torch.Tensor], psi0: Any) -> tuple[list[torch.Tensor], Any, float]:
        """Return the sums of mu_i - mu and of psi_i - psi, and the number of clients."""
        student, teacher = list(self.model.parameters()), list(self.teacher.parameters())
        if self.thetas is None:
            self.thetas = [[m.clone() for m in mu] for _ in self.data]
        total, psi_total = [torch.zeros_like(p) for p in mu], 0.0
        on_host = self.device == "cpu"
        for (x, y), theta in zip(self.data, self.thetas, strict=True):
            _load(student, theta)
            _load(teacher, mu)
            psi = psi0
            for indices in self.batches(len(y)):
                xb, yb = x[indices], y[indices]
                a, b = self.model(xb), self.teacher(xb)
                loss = F.cross_entropy(a, yb) + _kl(b.detach(), a) / (2 * psi)
                _step(student, torch.autograd.grad(loss, student))
                with torch.no_grad():
                    a = self.model(xb)
                _step(teacher, torch.autograd.grad(_kl(b, a) / (2 * psi), teacher))
                with torch.no_grad():
                    f = _kl(self.teacher(xb), a)
                f = float(f) if on_host else f
                psi = psi - LR_PSI * (1 / (2 * psi) - C * f / (2 * psi**2))
                psi = max(psi, FLOOR) if on_host else torch.clamp(psi, min=FLOOR)
            _load(theta, student)
            for t, p, m in zip(total, teacher, mu, strict=True):
                t.add_(p.detach() - m)
            psi_total += psi - psi0
        return total, psi_total, float(len(self.data))


class Server:
    """The global model and psi; the server runs its own clients and the clients of other processes."""

    def __init__(self, method: str, clients: Clients, pipes: list[Any]):
        self.method, self.clients, self.pipes = method, clients, pipes
        torch.manual_seed(0)
        device = clients.device
        self.mu = [p.detach().to(device).clone() for p in Net().parameters()]
        self.psi: Any = PSI if device == "cpu" else torch.tensor(PSI, device=device)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for pipe in self.pipes:
                pipe.send((self.mu, self.psi))
            answers = [work(self.method, self.clients, self.mu, self.psi), *(pipe.recv() for pipe in self.pipes)]
            weight = sum(answer[-1] for answer in answers)
            for i, p in enumerate(self.mu):
                p.add_(sum(answer[0][i] for answer in answers) / weight)
            if self.method == "adaped":
                self.psi = self.psi + sum(answer[1] for answer in answers) / weight
        if self.clients.device != "cpu":
            torch.cuda.synchronize()

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Return the accuracy of the global model on test images [n, 28, 28, 1]."""
        _load(list(self.clients.model.parameters()), self.mu)
        with torch.no_grad():
            logits = self.clients.model(torch.from_numpy(x).to(self.clients.device).permute(0, 3, 1, 2))
        return float((logits.argmax(1).cpu().numpy() == y).mean())


def unpad(data: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each client's real examples from stacked `jaxpfl.ClientData`."""
    return [(x[mask], y[mask]) for x, y, mask in zip(data.x, data.y, data.mask, strict=True)]


def work(method: str, clients: Clients, mu: list[torch.Tensor], psi: Any) -> tuple[Any, ...]:
    return clients.fedavg(mu) if method == "fedavg" else clients.adaped(mu, psi)


def helper(method: str, data: list[tuple[np.ndarray, np.ndarray]], steps: int, batch: int, pipe: Any) -> None:
    """Train a part of the clients for the server's process."""
    torch.set_num_threads(1)
    clients = Clients(data, steps, batch, channels_last=True)
    while True:
        try:
            mu, psi = pipe.recv()
        except EOFError:
            return
        pipe.send(work(method, clients, mu, psi))


def _kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    log_p, log_q = F.log_softmax(teacher, 1), F.log_softmax(student, 1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


@torch.no_grad()
def _load(params: list[Any], values: list[Any]) -> None:
    for p, v in zip(params, values, strict=True):
        p.copy_(v)


@torch.no_grad()
def _step(params: list[Any], gradients: tuple[torch.Tensor, ...]) -> None:
    torch._foreach_mul_(params, 1 - LR * WEIGHT_DECAY)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_add_(params, gradients, alpha=-LR)  # pyright: ignore[reportPrivateImportUsage]
