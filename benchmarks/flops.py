"""Floating-point operations and bytes, counted by hand.

A multiplication and an addition are two operations; only convolutions and dense layers count (pooling, biases and the
loss are below 2 %). A backward pass costs a layer as much as its forward pass for the kernel's gradient and as much
again for its input's; the first layer's input needs none.
"""

from __future__ import annotations

# Multiplications and additions of one example's forward pass: 2 x outputs x kernel.
CONV1 = 2 * (24 * 24 * 6) * (5 * 5 * 1)
CONV2 = 2 * (8 * 8 * 16) * (5 * 5 * 6)
DENSE = 2 * (256 * 120 + 120 * 84 + 84 * 10)

# Our convolution computes the four places of a pooling window from one patch of 6 x 6: it executes this many times
# the operations counted (see `jaxpfl.models.convolution.conv_pool`).
EXECUTED = (6 * 6) / (5 * 5)


def forward(batch: int) -> int:
    """The papers' MNIST CNN, one forward pass: F."""
    return batch * (CONV1 + CONV2 + DENSE)


def backward(batch: int) -> int:
    """Its backward pass: B. Each layer's dW and dX, without dX of conv1."""
    return batch * (CONV1 + 2 * (CONV2 + DENSE))


def cnn_step(method: str, batch: int = 20) -> int:
    """One client-step: F + B for FedAvg (30.3 MFLOP at batch 20), 4 F + 2 B for AdaPeD (2.74 times that).

    AdaPeD: theta and mu forward and backward once each, then theta and mu forward at their new values.
    """
    passes = {"fedavg": (1, 1), "adaped": (4, 2)}[method]
    return passes[0] * forward(batch) + passes[1] * backward(batch)


def cnn_step_executed(method: str, batch: int = 20) -> float:
    """The same with what our convolutions execute."""
    f, b = {"fedavg": (1, 1), "adaped": (4, 2)}[method]
    convolutions = f * (CONV1 + CONV2) + b * (CONV1 + 2 * CONV2)
    return cnn_step(method, batch) + (EXECUTED - 1) * batch * convolutions


def linear_bytes(clients: int, steps: int, examples: int, features: int, outputs: int) -> dict[str, float]:
    """Bytes of one full-participation FedAvg round of linear clients with full batches, in float32.

    Returns:
      ``memory``: each client's examples come from memory once, however many steps reread them from a cache;
      ``steps``: each step reads the examples and reads and writes the model, from wherever they are.
    """
    data = 4 * examples * (features + 2)  # inputs, labels, and masks of which XLA may make words
    model = 4 * outputs * (features + 1)
    return {"memory": float(clients * data), "steps": float(clients * steps * (data + 2 * model))}
